/** Why a client has, or has not, received a message, and the way of one message. */
import { count, utc } from "../format.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Card, Field, Head, State, Time } from "../parts/basics.js";
import { Preview } from "../parts/payload.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { change, link, route } from "../router.js";
import { text } from "../text.js";

const own = text.trace;
export const path = "trace";
export const title = own.title;
export const scope = "reader";

const KINDS = /** @type {Record<string, "good" | "warn" | "bad">} */ ({ delivered: "good", finished: "good", sent: "warn", waiting: "warn", expired: "bad", too_large: "bad", moved: "bad", shared: "warn", not_permitted: "bad", not_subscribed: "bad", no_message: "bad", ended: "bad" });
const status = (/** @type {string} */ name) => html`<${Badge} kind=${KINDS[name] || ""}>${name.replaceAll("_", " ")}<//>`;

export function component() {
  const { topic = "", client = "", at = "", time = "" } = route.value.params;
  const us = Date.parse(time) * 1000;
  const time_us = Number.isNaN(us) ? null : Math.round(us);
  const why = useLoad(topic && client ? "trace/why" : null, { topic, client, time_us });
  // The message that the sentence is about, so that both parts of the screen have the same one.
  const place = at || (why.data?.record ? `${why.data.record.partition}/${why.data.record.offset}` : "");
  const [partition, offset] = place.split("/");
  const isKnown = place || (topic && !client);
  const found = useLoad(isKnown ? "trace" : null, place ? { partition, offset } : { topic, time_us });
  const set = (/** @type {string} */ name) => (/** @type {string} */ value) => change({ [name]: value, at: null });
  return html`<${Head} title=${title} note=${own.note} />
    <div class="row"><${Field} label=${own.topic} value=${topic} onValue=${set("topic")} search class="wide mono" /><${Field} label=${own.client} value=${client} onValue=${set("client")} class="wide mono" />
      <${Field} label=${own.time} value=${time} onValue=${set("time")} placeholder=${own.now} class="wide" /></div>
    ${time && time_us === null && html`<p class="notice bad" role="alert">${own.badTime(utc(Date.now() * 1000))}</p>`}
    ${topic && client && html`<${State} of=${why} />${why.data && html`<${Card} title=${own.why(client)} aside=${status(why.data.status)}><p class="sentence"><${Raw} value=${why.data.sentence} max=${1000} /></p>
      ${why.data.unknown.length > 0 && html`<p class="note">${own.unknown} ${why.data.unknown.join("; ")}</p>`}<//>`}`}
    ${isKnown && html`<${State} of=${found} />`}${isKnown && found.data && html`<${Way} trace=${found.data} />`}
    ${!topic && !at && html`<p class="notice">${own.start}</p>`}`;
}

/** @param {{trace: any}} props */
function Way({ trace }) {
  const { record } = trace, place = `${record.partition}/${record.offset}`;
  return html`<div class="grid"><${Card} title=${own.way} aside=${html`<a href=${link("log", { at: place })}>${place}</a>`}><p><${Raw} value=${record.topic} max=${120} /> <${Preview} content=${record.content} /></p>
      <ol class="story">${trace.steps.map((/** @type {any} */ each) => html`<li class=${each.known ? "good" : ""}><span>${own.steps[/** @type {"append"} */ (each.step)] || each.step}</span><span><${Raw} value=${each.text} max=${300} /> ${each.at_us > 0 && html`<${Time} us=${each.at_us} fine />`}</span></li>`)}</ol><//>
    <${Card} title=${own.sessions} aside=${html`<span>${Object.entries(trace.counts).map(([name, many]) => html`${status(name)} ${count(/** @type {number} */ (many))} `)}</span>`}><${Table} label=${own.sessions} rows=${trace.sessions} rowKey=${(/** @type {any} */ row) => row.client} empty=${own.none} columns=${[
      { key: "client", title: own.client, cell: (/** @type {any} */ row) => html`<a href=${link("sessions", { client: row.client })}><${Raw} value=${row.client} max=${40} /></a>` },
      { key: "status", title: own.status, cell: (/** @type {any} */ row) => status(row.status) }, { key: "text", title: own.about, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.text} />` }]} />
      ${trace.groups.map((/** @type {any} */ each) => html`<p><${Raw} value=${each.group} /> ${status(each.status)}</p>`)}<//></div>
    <p class="note">${own.unknown} ${trace.unknown.join("; ")}.</p>`;
}
