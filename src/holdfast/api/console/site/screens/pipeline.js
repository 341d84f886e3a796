/** The data pipelines: their tables as a graph, how far each is, and what they could not decode. */
import { may, remove } from "../api.js";
import { compact, count, duration } from "../format.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Card, Choice, Command, Facts, Figure, Head, State, Time } from "../parts/basics.js";
import { Drawer, ask } from "../parts/drawer.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { change, route } from "../router.js";
import { text } from "../text.js";
import { attempt } from "../toasts.js";
import { Lane } from "./sessions.js";

const own = text.pipeline;
export const path = "pipeline";
export const title = own.title;
export const scope = "viewer";
const right = /** @type {"right"} */ ("right");
const WIDE = 230, TALL = 74, BOX = [176, 54];

/** @param {any} table */
const kindOf = (table) => (table.error ? "bad" : table.quarantined > 0 || table.lag === null ? "warn" : "good");
const lagOf = (/** @type {any} */ table) => (table.lag === null ? own.unknown : count(table.lag));

export function component() {
  const found = useLoad("pipeline", {}, { every: 5 });
  const all = found.data?.pipelines || [];
  const { name, table } = route.value.params;
  const shown = all.find((/** @type {any} */ each) => each.name === name) || all[0];
  // A job that has ended does not know the lag of its bronze table. The log does.
  const tables = shown?.tables.map((/** @type {any} */ each) => (each.layer === "bronze" && each.lag === null ? { ...each, lag: shown.lag } : each));
  const chosen = tables?.find((/** @type {any} */ each) => each.name === table);
  const forget = async () => {
    const sure = await ask({ title: own.forget, action: own.forget, danger: true, body: html`<p>${own.forgetNote}</p>` });
    if (sure && await attempt(() => remove("pipeline", { name: shown.name }), own.forgotten)) found.reload();
  };
  return html`<${Head} title=${title} note=${own.note}>
      ${all.length > 1 && html`<${Choice} label=${own.one} value=${shown.name} options=${all.map((/** @type {any} */ each) => [each.name, each.name])} onValue=${(/** @type {string} */ value) => change({ name: value, table: null })} />`}
      ${shown && may("operator") && html`<button onClick=${forget}>${own.forget}…</button>`}<//>
    <${State} of=${found} />${found.data && !shown && html`<${Card} title=${own.none}><p>${own.noneNote}</p><${Command} command=${`holdfast pipeline run --from ${location.host} --lake lake`} /><//>`}
    ${shown && html`<div class=${`health ${{ running: "good", ended: "good", failed: "bad", silent: "warn" }[/** @type {"failed"} */ (shown.state)]}`} role="status"><p>${own.states[/** @type {"failed"} */ (shown.state)](duration(shown.age_s))}</p></div>
      <div class="figures"><${Figure} name=${own.lag} value=${shown.lag === null ? own.unknown : count(shown.lag)} note=${own.lagNote} /><${Figure} name=${own.oldest} value=${shown.lag_s === null ? own.unknown : duration(shown.lag_s)} />
        <${Figure} name=${own.rows} value=${count(shown.rows)} /><${Figure} name=${own.quarantined} value=${count(shown.quarantined)} kind=${shown.quarantined ? "bad" : ""} /></div>
      <div class="split"><div><${Card} title=${own.graph}><${Graph} tables=${tables} chosen=${table} /><//>
        <${Table} label=${own.tables} rows=${tables} rowKey=${(/** @type {any} */ row) => row.name} isChosen=${(/** @type {any} */ row) => row.name === table} onRow=${(/** @type {any} */ row) => change({ table: row.name })} columns=${[
          { key: "name", title: own.table, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.name} max=${60} />` },
          { key: "layer", title: own.layer, minor: true, cell: (/** @type {any} */ row) => row.layer },
          { key: "rows", title: own.rows, align: right, cell: (/** @type {any} */ row) => count(row.rows) },
          { key: "lag", title: own.lag, align: right, cell: lagOf },
          { key: "bad", title: own.quarantined, align: right, minor: true, cell: (/** @type {any} */ row) => count(row.quarantined) },
          { key: "commit", title: own.commit, minor: true, cell: (/** @type {any} */ row) => (row.last_commit_us ? html`<${Time} us=${row.last_commit_us} />` : "–") }]} />
        <${Card} title=${own.positions}>${Object.entries(shown.ends).map(([partition, end]) => html`<${Lane} partition=${Number(partition)} low=${0} at=${shown.offsets[partition] || 0} high=${end} />`)}<//>
        <${Card} title=${own.job}><${Facts} rows=${[[own.lake, html`<${Raw} value=${shown.lake} max=${200} />`], [own.host, shown.host], [own.began, html`<${Time} us=${shown.began_us} />`], [own.trigger, shown.trigger_s > 0 && duration(shown.trigger_s)], [own.skipped, shown.skipped_total > 0 && count(shown.skipped_total)]]} />
          <${Command} title=${own.report} command=${`holdfast pipeline report --lake ${shown.lake}`} /><//></div>
        ${chosen && html`<${Drawer} key=${table} title=${html`<${Raw} value=${table} />`} onClose=${() => change({ table: null })}>
          ${chosen.error && html`<p class="notice bad"><${Raw} value=${chosen.error} max=${1000} /></p>`}
          <${Facts} rows=${[[own.source, chosen.source], [own.lag, lagOf(chosen)], [own.behind, chosen.lag_s !== null && duration(chosen.lag_s)], [own.last, count(chosen.last_rows)], [own.took, duration(chosen.last_took_s)], [own.version, chosen.version],
            ...Object.entries(chosen.counts).map(([key, many]) => [key.replaceAll("_", " "), count(/** @type {number} */ (many))])]} /><//>`}</div>`}`;
}

/** The tables, each right of its source. @param {{tables: any[], chosen?: string}} props */
function Graph({ tables, chosen }) {
  const known = new Map(tables.map((each) => [each.name, each]));
  /** @param {any} table @param {number} [left] a bound for tables that are their own sources @returns {number} */
  const depth = (table, left = tables.length) => (known.has(table.source) && left ? 1 + depth(known.get(table.source), left - 1) : 0);
  const columns = /** @type {any[][]} */ ([]);
  for (const table of tables) (columns[depth(table)] ||= []).push(table);
  const places = new Map(columns.flatMap((column, x) => column.map((table, y) => [table.name, [x * WIDE + 4, y * TALL + 4]])));
  const tall = Math.max(1, ...columns.map((column) => column.length)) * TALL;
  return html`<div class="graph" tabindex="0" role="group" aria-label=${own.graph}><svg width=${columns.length * WIDE - 40} height=${tall}>
    ${tables.filter((each) => places.has(each.source)).map((each) => {
      const [[x, y], [toX, toY]] = [places.get(each.source) || [0, 0], places.get(each.name) || [0, 0]], from = x + BOX[0];
      return html`<path class="edge flow" d=${`M${from},${y + 27}C${from + 27},${y + 27} ${toX - 27},${toY + 27} ${toX},${toY + 27}`} />`;
    })}
    ${tables.map((each) => { const [x, y] = places.get(each.name) || [0, 0]; return html`<g class=${`box ${kindOf(each)} ${each.name === chosen ? "chosen" : ""}`} transform=${`translate(${x} ${y})`} onClick=${() => change({ table: each.name })}>
      <rect width=${BOX[0]} height=${BOX[1]} rx="9" /><text class="name" x="12" y="23">${each.name.length > 20 ? `${each.name.slice(0, 19)}…` : each.name}</text><text x="12" y="42">${own.boxed(compact(each.rows), lagOf(each))}</text><title>${each.name}</title></g>`; })}</svg></div>`;
}
