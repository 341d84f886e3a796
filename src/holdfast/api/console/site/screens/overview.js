/** The overview: health in words, rates, sessions behind, and the last events. */
import { compact, count, bytes, duration } from "../format.js";
import { nodes, notes, rates, states } from "../events.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Card, Figure, Head, State, Time } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { text } from "../text.js";
import { verdict } from "./cluster.js";

const own = text.overview;
export const path = "";
export const title = own.title;
export const scope = "viewer";

/** @typedef {import("../events.js").Note} Note */

/** The state in sentences, as bad as on the screen of the cluster. @param {any} cluster @returns {["good" | "warn" | "bad", string[]]} */
function health(cluster) {
  const serving = Object.entries(nodes.value).filter(([name]) => !["down", "removed"].includes(states.value[name]));
  const unready = serving.filter(([, node]) => node.obstacles.length);
  const sentences = unready.map(([name, node]) => own.notReady(name, node.obstacles.join(", ")));
  const [kind, told] = cluster ? verdict(cluster) : ["good", []];
  if (kind !== "good") return [unready.length === serving.length ? "bad" : /** @type {"warn"} */ (kind), [...told, ...sentences]];
  if (sentences.length) return [unready.length === serving.length ? "bad" : "warn", sentences];
  return ["good", [serving.length ? own.serves(serving.length) : text.loading]];
}

/** A line of the log as a row: its fields in one text. @param {Note} note */
export const fields = (note) => Object.entries(note.fields).map(([name, value]) => `${name}=${value}`).join(" ");

export const level = (/** @type {string} */ name) => /** @type {"bad" | "warn" | ""} */ (({ error: "bad", warning: "warn", critical: "bad" })[name.toLowerCase()] || "");

/** The columns of lines of the log. */
export const eventColumns = [
  { key: "time", title: own.time, cell: (/** @type {Note} */ note) => html`<${Time} us=${note.at_us} />` },
  { key: "node", title: own.node, cell: (/** @type {Note} */ note) => note.node, minor: true },
  { key: "event", title: own.event, cell: (/** @type {Note} */ note) => html`<${Badge} kind=${level(note.level)}>${note.event}<//>` },
  { key: "fields", title: own.fields, cell: (/** @type {Note} */ note) => html`<${Raw} value=${fields(note)} max=${140} />` },
];

const right = /** @type {"right"} */ ("right");
const diskColumns = [
  { key: "node", title: own.node, cell: (/** @type {any} */ row) => row.node },
  { key: "log", title: own.log, align: right, cell: (/** @type {any} */ row) => bytes(row.log_bytes) },
  { key: "free", title: own.free, align: right, cell: (/** @type {any} */ row) => bytes(row.free_bytes) },
  { key: "growth", title: own.growth, align: right, minor: true, cell: (/** @type {any} */ row) => `${bytes(row.growth_bytes_per_s)}/s` },
  { key: "oldest", title: own.oldest, minor: true, cell: (/** @type {any} */ row) => html`<${Time} us=${row.oldest_us} />` },
  { key: "full", title: own.full, align: right, cell: (/** @type {any} */ row) => row.full_in_s === null ? html`<span class="faint">${own.notFull}</span>` : html`<${Badge} kind=${row.full_in_s < 86400 ? "bad" : row.full_in_s < 604800 ? "warn" : ""}>${duration(row.full_in_s)}<//>` },
];

export function component() {
  const cluster = useLoad(Object.keys(states.value).length ? "cluster" : null, {}, { every: 5 });
  const behind = useLoad("sessions", { sort: "log_lag", descending: true, limit: 5 }, { every: 5 });
  const disks = useLoad("storage", {}, { every: 15 }), earlier = useLoad("notes", { limit: 12 });
  const keyOf = (/** @type {Note} */ note) => `${note.node}${note.at_us}${note.event}${fields(note)}`;
  // The stream may repeat what the request has found.
  const events = [...new Map([...notes.value, ...(earlier.data?.notes || [])].map((each) => [keyOf(each), each])).values()].sort((a, b) => b.at_us - a.at_us);
  const [kind, sentences] = health(cluster.data);
  const last = rates.value.at(-1)?.[1] || {};
  const rows = (behind.data?.sessions || []).filter((/** @type {any} */ each) => each.log_lag > 0);
  return html`<${Head} title=${title} />
    <div class=${"health " + kind} role="status">${sentences.map((each) => html`<p>${each}</p>`)}</div>
    <div class="figures">
      <${Figure} name=${own.received} value=${compact(last.publish_received || 0)} note=${bytes(last.bytes_received || 0) + "/s"} />
      <${Figure} name=${own.sent} value=${compact(last.publish_sent || 0)} note=${bytes(last.bytes_sent || 0) + "/s"} />
      <${Figure} name=${own.connections} value=${count(last.connections || 0)} />
      <${Figure} name=${own.sessions} value=${count(behind.data?.matched || 0)} />
    </div>
    <div class="grid"><${Card} title=${own.ratesTitle} aside=${own.ratesNote}>
      <${Chart} label=${own.ratesTitle} height=${180} x=${rates.value.map(([at]) => at)} series=${[
        { label: own.in, values: rates.value.map(([, each]) => each.publish_received || 0), fill: true },
        { label: own.out, values: rates.value.map(([, each]) => each.publish_sent || 0) }]} /><//>
    <${Card} title=${own.slowest}><${State} of=${behind} second /><${Table} label=${own.slowest} rows=${rows} rowKey=${(/** @type {any} */ row) => row.client} empty=${own.noneBehind} columns=${[
      { key: "client", title: own.client, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.client} max=${40} />` },
      { key: "lag", title: own.lag, align: "right", cell: (/** @type {any} */ row) => count(row.log_lag) }]} /><//></div>
    <${Card} title=${own.disk}><${State} of=${disks} /><${Table} label=${own.disk} rows=${disks.data?.nodes || []} rowKey=${(/** @type {any} */ row) => row.node} columns=${diskColumns} /><//>
    <${Card} title=${own.events}><${State} of=${earlier} second /><${Table} label=${own.events} columns=${eventColumns} rows=${events.slice(0, 12)}
      rowKey=${keyOf} empty=${own.noEvents} /><//>`;
}
