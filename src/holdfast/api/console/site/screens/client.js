/** Publish and subscribe as an MQTT client, over the broker's WebSocket listener. */
import { count } from "../format.js";
import { html, signal, useEffect } from "../lib.js";
import { useLoad } from "../load.js";
import { MqttClient } from "../mqtt.js";
import { Badge, Card, Head, State, Time } from "../parts/basics.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { text } from "../text.js";
import { attempt, toast } from "../toasts.js";

const own = text.client;
export const path = "client";
export const title = own.title;
export const scope = "viewer";
export const group = text.groups.admin;

const KEPT = 200;
const decoder = new TextDecoder();
/** @type {import("../vendor/signals.js").Signal<MqttClient | null>} */
const client = signal(/** @type {any} */ (null));
/** @type {import("../vendor/signals.js").Signal<import("../mqtt.js").Message[]>} */
const messages = signal(/** @type {any} */ ([]));
/** @type {import("../vendor/signals.js").Signal<string[]>} */
const filters = signal(/** @type {any} */ ([]));
const seen = signal(0);
/** What came since the last frame: a busy topic changes the page once a frame.
 * @type {import("../mqtt.js").Message[]} */
let fresh = [];

/** @param {import("../mqtt.js").Message} message */
function receive(message) {
  if (!fresh.length) requestAnimationFrame(() => {
    messages.value = [...fresh.reverse(), ...messages.value].slice(0, KEPT);
    fresh = [];
  });
  seen.value++;
  fresh.push(message);
  if (fresh.length > KEPT) fresh.shift();
}

/** The WebSocket listeners, by the settings. @param {any[]} rows */
function listeners(rows) {
  const found = /** @type {Record<string, any>} */ ({});
  for (const row of rows) {
    const match = /^listeners\[(\d+)\]\.(\w+)$/.exec(row.key);
    if (match) (found[match[1]] ??= {})[match[2]] = row.value;
  }
  return Object.values(found).filter((each) => each.transport === "websocket" && each.port)
    .map((each) => `${each.certificate ? "wss" : "ws"}://${location.hostname}:${each.port}${each.path || "/mqtt"}`);
}

/** @param {(given: any) => Promise<any>} run */
const form = (run) => (/** @type {SubmitEvent} */ event) => {
  event.preventDefault();
  attempt(() => run(Object.fromEntries(new FormData(/** @type {HTMLFormElement} */ (event.target)))));
};

/** @param {any} given */
async function connect({ url, id, user, password }) {
  const made = new MqttClient(url, { id, user, password }, { onMessage: receive, onClose: (reason) => {
    if (client.value === made) toast(own.closed(reason), "bad");
    client.value = null;
    filters.value = [];
  } });
  await made.connected.catch((error) => { throw new Error(own.refused(error.message)); });
  client.value = made;
}

/** @param {string} filter @param {number} qos */
async function subscribe(filter, qos) {
  await client.value?.subscribe(filter, qos).catch((error) => { throw new Error(own.refused(error.message)); });
  filters.value = [...filters.value.filter((each) => each !== filter), filter];
}

export function component() {
  const settings = useLoad("settings");
  useEffect(() => () => { client.value?.close(); client.value = null; messages.value = []; seen.value = 0; }, []);
  const urls = listeners(settings.data?.settings || []), is = client.value;
  const quality = html`<select name="qos" aria-label="QoS">${[1, 0, 2].map((qos) => html`<option value=${qos}>QoS ${qos}</option>`)}</select>`;
  if (settings.data && !urls.length) return html`<${Head} title=${title} /><p class="notice">${own.none}</p><pre>${own.example}</pre>`;
  return html`<${Head} title=${title} note=${own.note}>${is && html`<button onClick=${() => { const old = is; client.value = null; old.close(); }}>${own.disconnect}</button>`}<//><${State} of=${settings} />
    ${!settings.data ? null : !is ? html`<${Card} title=${own.connect}><form class="row" onSubmit=${form(connect)}><label>${own.listener}<select name="url">${urls.map((url) => html`<option>${url}</option>`)}</select></label>
        <label>${own.id}<input name="id" value=${`console-${Math.random().toString(36).slice(2, 8)}`} /></label><label>${own.user}<input name="user" autocomplete="off" /></label>
        <label>${own.password}<input name="password" type="password" autocomplete="off" /></label><button class="primary">${own.connect}</button></form><//>`
    : html`<div class="grid"><${Card} title=${own.subscribe}><form class="row" onSubmit=${form((given) => subscribe(given.filter, Number(given.qos)))}><input class="wide" name="filter" aria-label=${own.filter} placeholder=${own.filter} required data-search />${quality}<button class="primary">${own.subscribe}</button></form>
        <p class="row">${filters.value.map((filter) => html`<span class="badge info"><${Raw} value=${filter} max=${40} /> <button class="plain" aria-label=${own.stop(filter)} onClick=${() => attempt(async () => { await is.unsubscribe(filter); filters.value = filters.value.filter((each) => each !== filter); })}>✕</button></span>`)}</p><//>
      <${Card} title=${own.publish}><form onSubmit=${form(async (given) => { await is.publish(given.topic, given.payload, Number(given.qos), !!given.retain).catch((error) => { throw new Error(own.refused(error.message)); }); toast(own.published); })}>
        <div class="row"><input class="wide" name="topic" aria-label=${own.topic} placeholder=${own.topic} required />${quality}<label class="check"><input type="checkbox" name="retain" />${own.retain}</label></div>
        <textarea name="payload" rows="3" aria-label=${own.payload} placeholder=${own.payload}></textarea><div class="buttons"><button class="primary">${own.publish}</button></div></form><//></div>`}
    <${Card} title=${own.messages} aside=${own.counted(count(seen.value), KEPT)}><${Table} label=${own.messages} rows=${messages.value} rowKey=${(/** @type {any} */ row) => row.at + row.topic + row.payload.length} empty=${own.waiting} columns=${[
      { key: "t", title: own.time, cell: (/** @type {any} */ row) => html`<${Time} us=${row.at} fine />` }, { key: "n", title: own.topic, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.topic} max=${80} />` },
      { key: "q", title: "QoS", minor: true, cell: (/** @type {any} */ row) => html`${row.qos} ${row.retain && html`<${Badge}>${own.retained}<//>`}` },
      { key: "p", title: own.payload, cell: (/** @type {any} */ row) => html`<${Raw} value=${decoder.decode(row.payload)} max=${200} />` }]} /><//>`;
}
