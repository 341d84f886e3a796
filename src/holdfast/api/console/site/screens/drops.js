/** What was dropped or refused since the start with the last cases, the sessions that cannot keep up,
 * and how near the limits are. */
import { bytes, count } from "../format.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Card, Head, State } from "../parts/basics.js";
import { Meter } from "../parts/chart.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { link } from "../router.js";
import { text } from "../text.js";
import { eventColumns, fields } from "./overview.js";

const own = text.drops;
export const path = "drops";
export const title = own.title;
export const scope = "viewer";
const right = /** @type {"right"} */ ("right");

/** A part of every node's reply as one list. @param {any} reply @param {string} part @returns {any[]} */
const rowsOf = (reply, part) => (reply?.nodes || []).flatMap((/** @type {any} */ node) => node[part].map((/** @type {any} */ each) => ({ ...each, node: node.node })));

/** The sums of all nodes by reason, the largest first. @param {any} reply @param {"dropped" | "refused"} part @returns {[string, number][]} */
function sums(reply, part) {
  const found = /** @type {Record<string, number>} */ ({});
  for (const node of reply?.nodes || []) for (const [name, many] of Object.entries(node[part])) found[name] = (found[name] || 0) + Number(many);
  return Object.entries(found).filter(([, many]) => many > 0).sort((a, b) => b[1] - a[1]);
}

/** @param {string} name @param {number} value */
const amount = (name, value) => (name.endsWith("bytes") ? bytes(value) : count(value));

export function component() {
  const drops = useLoad("drops", { cases: 50 }, { every: 5 }), limits = useLoad("limits", {}, { every: 5 });
  const behind = useLoad("sessions", { sort: "log_lag", descending: true, limit: 10 }, { every: 5 });
  const lossy = useLoad("sessions", { sort: "dropped", descending: true, limit: 10 }, { every: 5 });
  const cases = rowsOf(drops.data, "cases").sort((a, b) => b.at_us - a.at_us).slice(0, 50);
  const slow = new Map([...(behind.data?.sessions || []), ...(lossy.data?.sessions || [])].filter((each) => each.log_lag || each.dropped).map((each) => [each.client, each]));
  const part = (/** @type {"dropped" | "refused"} */ name) => html`<${Card} title=${own[name]}><${Table} label=${own[name]} rows=${sums(drops.data, name)} rowKey=${(/** @type {any} */ row) => row[0]} empty=${drops.data ? own.none : text.loading} columns=${[
    { key: "reason", title: own.reason, cell: (/** @type {any} */ row) => row[0].replaceAll("_", " ") },
    { key: "count", title: own.count, align: right, cell: (/** @type {any} */ row) => count(row[1]) }]} /><//>`;
  return html`<${Head} title=${title} note=${own.note} /><${State} of=${drops} /><div class="grid">${part("dropped")}${part("refused")}</div>
    <${Card} title=${own.cases}><${Table} label=${own.cases} columns=${eventColumns} rows=${cases} rowKey=${(/** @type {any} */ row) => `${row.node}${row.at_us}${row.event}${fields(row)}`} empty=${own.noCases} /><//>
    <${State} of=${behind} second /><${Card} title=${own.slow}><${Table} label=${own.slow} rows=${[...slow.values()]} rowKey=${(/** @type {any} */ row) => row.client} empty=${own.noneSlow} columns=${[
      { key: "client", title: text.sessions.client, cell: (/** @type {any} */ row) => html`<a href=${link("sessions", { client: row.client })}><${Raw} value=${row.client} max=${50} /></a>` },
      ...["log_lag", "queued", "inflight", "dropped"].map((key) => ({ key, title: text.sessions.numbers[/** @type {"queued"} */ (key)], align: right, minor: key === "inflight" || key === "queued", cell: (/** @type {any} */ row) => count(row[key]) }))]} /><//>
    <${State} of=${limits} second /><${Card} title=${own.limits}><${Table} label=${own.limits} rows=${rowsOf(limits.data, "limits")} rowKey=${(/** @type {any} */ row) => row.node + row.name} columns=${[
      { key: "node", title: text.overview.node, cell: (/** @type {any} */ row) => row.node },
      { key: "name", title: own.limit, class: "mono", cell: (/** @type {any} */ row) => row.name.split("_").map((/** @type {string} */ part, /** @type {number} */ index) => html`${index > 0 && html`_<wbr />`}${part}`) },
      { key: "used", title: own.used, align: right, cell: (/** @type {any} */ row) => amount(row.name, row.used) },
      { key: "most", title: own.most, align: right, cell: (/** @type {any} */ row) => (row.most ? amount(row.name, row.most) : own.unlimited) },
      { key: "share", title: own.share, minor: true, cell: (/** @type {any} */ row) => row.most > 0 && html`<${Meter} value=${row.used} of=${row.most} label=${row.name} />` }]} /><//>`;
}
