/** The sessions, and one session in full: where it is in the log, and what it has not acknowledged. */
import { may, post, remove } from "../api.js";
import { ago, bytes, count, duration } from "../format.js";
import { html, useState } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Choice, Facts, Field, Head, State, Time } from "../parts/basics.js";
import { Drawer, ask } from "../parts/drawer.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { change, link, route } from "../router.js";
import { text } from "../text.js";
import { attempt, toast } from "../toasts.js";
import { ban } from "./bans.js";
import { fields } from "./overview.js";

const own = text.sessions;
export const path = "sessions";
export const title = own.title;
export const scope = "viewer";
const right = /** @type {"right"} */ ("right");

const columns = [
  { key: "client", title: own.client, sort: true, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.client} max=${50} />` },
  { key: "state", title: own.state, cell: (/** @type {any} */ row) => html`<${Badge} kind=${row.connected ? "good" : ""}>${row.connected ? own.connected : own.away}<//>` },
  { key: "user", title: own.user, sort: true, minor: true, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.user} max=${30} empty="–" />` },
  { key: "address", title: own.address, sort: true, minor: true, cell: (/** @type {any} */ row) => row.address || "–" },
  ...["subscriptions", "inflight", "queued", "log_lag"].map((key) => ({ key, title: own.numbers[/** @type {"queued"} */ (key)], sort: true, align: right, minor: key !== "log_lag", cell: (/** @type {any} */ row) => count(row[key]) })),
];

const inflightColumns = [
  { key: "packet", title: own.packet, cell: (/** @type {any} */ each) => each.packet_id },
  { key: "state", title: own.state, cell: (/** @type {any} */ each) => html`<span title=${each.released ? own.releasedNote : own.sentNote}>${each.released ? own.released : own.sent}</span>` },
  { key: "qos", title: "QoS", cell: (/** @type {any} */ each) => each.qos },
  { key: "age", title: html`<span title=${own.ageNote}>${own.age}</span>`, align: right, cell: (/** @type {any} */ each) => (each.at_us ? ago(each.at_us) : "–") },
  { key: "place", title: own.record, class: "mono", cell: (/** @type {any} */ each) => html`<a href=${link("log", { at: `${each.partition}/${each.offset}` })}>${each.partition}/${each.offset}</a>` },
];

export function component() {
  const { search, state = "all", sort = "client", down, after, client } = route.value.params;
  const page = useLoad("sessions", { search, state, sort, descending: down === "on", after, limit: 50 }, { every: 5 });
  return html`<${Head} title=${title} note=${page.data && own.matched(count(page.data.matched))} />
    <div class="row"><${Field} label=${own.search} value=${search || ""} onValue=${(/** @type {string} */ value) => change({ search: value, after: null })} search class="wide" />
      <${Choice} label=${own.state} value=${state} options=${[["all", own.all], ["connected", own.connected], ["away", own.away]]} onValue=${(/** @type {string} */ value) => change({ state: value, after: null })} /></div>
    <${State} of=${page} /><div class="split"><div><${Table} label=${title} columns=${columns} rows=${page.data?.sessions || []} rowKey=${(/** @type {any} */ row) => row.client}
      onRow=${(/** @type {any} */ row) => change({ client: row.client })} isChosen=${(/** @type {any} */ row) => row.client === client}
      order=${{ by: sort, down: down === "on", onOrder: (/** @type {string} */ by, /** @type {boolean} */ isDown) => change({ sort: by, down: isDown ? "on" : null, after: null }) }}
      less=${after ? () => change({ after: null }) : null} more=${page.data?.next ? () => change({ after: page.data.next }) : null} /></div>
      ${client && html`<${Inspector} key=${client} client=${client} onChanged=${page.reload} />`}</div>`;
}

/** @param {{client: string, onChanged: () => void}} props */
function Inspector({ client, onChanged }) {
  const found = useLoad("session", { client }, { every: 3 });
  const log = useLoad(may("reader") ? "log" : null, {}, { every: 3 });
  const detail = found.data, row = detail?.session;
  const done = () => { found.reload(); onChanged(); };
  return html`<${Drawer} title=${html`<${Raw} value=${client} max=${80} />`} onClose=${() => change({ client: null })}><${State} of=${found} />
    ${row && html`<${Facts} rows=${[[own.state, row.connected ? own.connected : own.away], [own.address, row.address], [own.user, row.user && html`<${Raw} value=${row.user} />`], [own.node, row.node], [own.protocol, row.protocol],
        [own.listener, row.listener], [own.keepAlive, row.keep_alive_s > 0 && duration(row.keep_alive_s)], [own.idle, row.connected && duration(row.idle_s)], [own.since, row.away_since_us > 0 && html`<${Time} us=${row.away_since_us} />`],
        [own.expires, row.expires_at_us > 0 && html`<${Time} us=${row.expires_at_us} />`], [own.will, detail.will_topic && html`<${Raw} value=${detail.will_topic} />`], [own.needed, detail.needed_bytes > 0 && bytes(detail.needed_bytes)], [own.numbers.dropped, count(row.dropped)]]} />
      ${may("operator") && html`<div class="row">${row.connected && html`<button onClick=${() => disconnect(client).then(done)}>${own.disconnect}</button>`}
        ${row.expiry_s > 0 && html`<button onClick=${() => move(client).then(done)}>${own.move}</button>`}<button class="danger" onClick=${() => end(client).then(done)}>${own.end}</button>
        <button class="danger" onClick=${() => ban({ client, user: row.user, address: row.address.replace(/:\d+$/, "").replace(/[[\]]/g, "") }).then(done)}>${own.ban}…</button></div>`}
      <h2>${own.positions}</h2>${detail.positions.map((/** @type {number} */ at, /** @type {number} */ partition) => html`<${Lane} partition=${partition} low=${log.data?.ranges[partition]?.[0] ?? 0} at=${at} high=${detail.ends[partition]} />`)}
      <h2>${own.inflightOf(count(row.inflight))}</h2>${row.inflight > 0 && html`<${Table} label=${own.numbers.inflight} columns=${inflightColumns} rows=${detail.inflight.slice(0, 50)} rowKey=${(/** @type {any} */ each) => each.packet_id} />`}
      <h2>${own.subscribed(count(row.subscriptions))}</h2>${detail.subscriptions.map((/** @type {any} */ each) => html`<div><${Raw} value=${each.filter} max=${100} /> <span class="faint">QoS ${each.qos}</span></div>`)}
      <h2>${own.history}</h2><${History} key=${`${row.connected} ${row.address}`} client=${client} />`}<//>`;
}

/** What happened to a client, loaded again when it connects or leaves. @param {{client: string}} props */
function History({ client }) {
  const [before, setBefore] = useState(/** @type {number | null} */ (null));
  const found = useLoad("session/history", { client, before });
  const { data } = found;
  return html`<${State} of=${found} second /><ol class="story">${data?.events.map((/** @type {any} */ each) => html`<li><${Time} us=${each.at_us} /><span><${Badge} kind=${kindOf(each.event)}>${each.event.replaceAll("_", " ")}<//>
      <${Raw} value=${[each.node, fields(each)].filter(Boolean).join(" · ")} max=${160} /></span></li>`)}</ol>
    ${data && !data.events.length && html`<p class="note">${own.noHistory}</p>`}
    <div class="row">${before !== null && html`<button onClick=${() => setBefore(null)}>${text.back}</button>`}${data?.next > 0 && html`<button onClick=${() => setBefore(data.next)}>${own.earlier}</button>`}</div>`;
}

/** @param {string} event */
const kindOf = (event) => /denied|refused|error|timeout|ended|taken/.test(event) ? "warn" : /^connected|opened/.test(event) ? "good" : "";

/** Where a session is in one partition. Partitions without records are left out.
 * @param {{partition: number, low: number, at: number, high: number}} props */
export function Lane({ partition, low, at, high }) {
  if (high <= low) return null;
  const share = Math.min(1, Math.max(0, (at - low) / (high - low)));
  return html`<div class="lane" title=${own.lane(count(low), count(at), count(high))}><span class="num">${partition}</span>
    <span class=${at < high ? "meter warn" : "meter"} role="img" aria-label=${own.lane(count(low), count(at), count(high))}><i style=${{ width: `${share * 100}%` }}></i></span><span class="num">${at < high ? own.behind(count(high - at)) : own.live}</span></div>`;
}

/** @param {string} client */
async function disconnect(client) {
  const given = await ask({ title: own.disconnect, body: html`<${Raw} value=${client} /> ${own.disconnectNote}`, action: own.disconnect });
  if (given) await attempt(() => post("session/disconnect", { client }), own.disconnected);
}

/** @param {string} client */
async function end(client) {
  const given = await ask({ title: own.end, body: html`<${Raw} value=${client} /> ${own.endNote}`, action: own.end, danger: true });
  if (given) await attempt(() => remove("session", { client }), own.ended);
}

/** Move a session after a count of what it would skip or repeat. @param {string} client */
async function move(client) {
  const given = await ask({ title: own.move, action: own.countFirst, fields: [
    { name: "to", label: own.to, options: [["end", own.toEnd], ["start", own.toStart], ["time", own.toTime]] }, { name: "time", label: own.time, type: "datetime-local" }] });
  if (!given) return;
  const plan = { to: given.to, time_us: given.to === "time" ? Date.parse(given.time) * 1000 : 0 };
  if (Number.isNaN(plan.time_us)) return toast(own.timeMissing, "bad");
  await attempt(async () => {
    const counted = await post("session/move", { client }, { ...plan, dry_run: true });
    const sure = await ask({ title: own.move, body: own.planned(count(counted.skipped), count(counted.repeated), counted.exact), action: own.move, danger: true });
    if (sure) await attempt(() => post("session/move", { client }, plan), own.moved);
  });
}
