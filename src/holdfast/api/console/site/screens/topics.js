/** The tree of topics, of which only open branches are loaded, and one topic: its last value, publish,
 * and delete the retained messages below it, with undo. */
import { may, post, remove } from "../api.js";
import { bytes, compact, count } from "../format.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Facts, Field, Head, State, Time } from "../parts/basics.js";
import { Drawer, ask } from "../parts/drawer.js";
import { Preview, jsonOf } from "../parts/payload.js";
import { Raw } from "../parts/raw.js";
import { change, link, route } from "../router.js";
import { text } from "../text.js";
import { attempt, toast } from "../toasts.js";

const own = text.topics;
export const path = "topics";
export const title = own.title;
export const scope = "viewer";

/** The open branches. @returns {string[]} */
function opened() {
  try {
    const found = JSON.parse(route.value.params.open || "[]");
    return Array.isArray(found) ? found.filter((each) => typeof each === "string") : [];
  } catch {
    return [];
  }
}

/** @param {string} topic */
function toggle(topic) {
  const open = opened();
  const next = open.includes(topic) ? open.filter((each) => each !== topic && !each.startsWith(topic + "/")) : [...open, topic];
  change({ open: next.length ? JSON.stringify(next) : null }, true);
}

export function component() {
  const { below = "", at } = route.value.params;
  return html`<${Head} title=${title} note=${own.note}>${may("operator") && html`<button onClick=${() => publish(at || below)}>${own.publish}…</button>`}<//>
    <div class="row"><${Field} label=${own.below} value=${below} onValue=${(/** @type {string} */ value) => change({ below: value, open: null })} search class="wide mono" /></div>
    <div class="split"><div class="card tree"><${Branch} key=${below} prefix=${below} /></div>${at && html`<${Detail} key=${at} topic=${at} />`}</div>`;
}

/** The levels below a prefix. @param {{prefix: string, after?: string}} props */
function Branch({ prefix, after }) {
  const found = useLoad("topics", { prefix, after, limit: 100 }, { every: 5 });
  const open = opened(), { data } = found;
  const isNext = data?.next && open.includes(`${prefix}//${data.next}`);
  return html`<${State} of=${found} />${data && !data.topics.length && html`<p class="faint">${own.none}</p>`}<ul>${data?.topics.map((/** @type {any} */ node) => html`<li key=${node.level}>
      <div class=${node.topic === route.value.params.at ? "node chosen" : "node"}>${node.has_children ? html`<button class="plain" aria-expanded=${open.includes(node.topic)} aria-label=${own.open(node.topic)} onClick=${() => toggle(node.topic)}>${open.includes(node.topic) ? "▾" : "▸"}</button>` : html`<span></span>`}
        <a href=${link(path, { ...route.value.params, at: node.topic })}><${Raw} value=${node.level} max=${60} /></a>${node.retained && html`<${Badge} kind="info">${own.retained}<//>`}
        ${node.value ? html`<span class="value"><${Preview} content=${node.value} /></span>` : html`<span class="value faint">${node.topics > 1 && own.count(count(node.topics))}</span>`}<span class="num faint">${node.messages_per_s >= 0.05 && `${compact(node.messages_per_s)}/s`}</span></div>
      ${node.has_children && open.includes(node.topic) && html`<${Branch} prefix=${node.topic} />`}</li>`)}</ul>
    ${data?.next && (isNext ? html`<${Branch} prefix=${prefix} after=${data.next} />` : html`<button onClick=${() => toggle(`${prefix}//${data.next}`)}>${text.more}</button>`)}`;
}

/** One topic. @param {{topic: string}} props */
function Detail({ topic }) {
  const log = useLoad(may("reader") ? "log/records" : null, { filter: topic, kind: "message", limit: 10 }, { every: 5 });
  const kept = useLoad("retained", { filter: topic, system: topic.startsWith("$"), limit: 1 }, { every: 5 });
  const last = log.data?.records[0], held = kept.data?.messages[0];
  const json = last && jsonOf(last.content);
  return html`<${Drawer} title=${html`<${Raw} value=${topic} max=${120} />`} onClose=${() => change({ at: null })}><${State} of=${log} /><${State} of=${kept} />
    ${last && html`<${Facts} rows=${[[own.last, html`<${Time} us=${last.at_us} fine />`], [own.publisher, html`<${Raw} value=${last.client} max=${60} />`], [own.size, bytes(last.content.bytes)], [own.retained, held && html`<${Time} us=${held.at_us} />`]]} />
      <pre tabindex="0">${json === undefined ? html`<${Preview} content=${last.content} />` : html`<${Raw} lines max=${4000} value=${JSON.stringify(json, null, 2)} />`}</pre>
      <h2>${own.before}</h2>${log.data.records.map((/** @type {any} */ each) => html`<div><a href=${link("log", { filter: topic, at: `${each.partition}/${each.offset}` })}><${Time} us=${each.at_us} fine /></a> <${Preview} content=${each.content} /></div>`)}`}
    ${log.data && !last && html`<p class="faint">${own.noMessage}</p>`}
    <div class="row"><a href=${link("log", { filter: `${topic}/#` })}>${own.toLog}</a><a href=${link("trace", { topic })}>${text.trace.title}</a></div>
    ${may("operator") && html`<div class="row"><button onClick=${() => publish(topic)}>${own.publish}…</button><button class="danger" onClick=${() => clear(topic).then(kept.reload)}>${own.clear}…</button></div>`}<//>`;
}

/** @param {string} topic */
async function publish(topic) {
  const given = await ask({ title: own.publish, action: own.publish, fields: [{ name: "topic", label: own.topic, value: topic }, { name: "payload", label: own.payload },
    { name: "qos", label: "QoS", value: "1", options: [["0", "0"], ["1", "1"], ["2", "2"]] }, { name: "retain", label: own.retained, options: [["", own.no], ["on", own.yes]] }] });
  if (given) await attempt(() => post("publish", {}, { topic: given.topic, payload: given.payload, qos: Number(given.qos), retain: given.retain === "on" }), own.published);
}

/** Delete the retained messages at and below a topic, after a count, and offer to undo it. @param {string} topic */
async function clear(topic) {
  const filter = `${topic}/#`;
  await attempt(async () => {
    const plan = await remove("retained", { filter, dry_run: true });
    const many = plan.deleted.length + plan.not_in_log;
    const sure = await ask({ title: own.clear, body: html`<${Raw} value=${filter} /> <p>${own.planned(count(many), plan.more, count(plan.not_in_log))}</p>`, action: own.clear, danger: true });
    if (!sure) return;
    const done = await remove("retained", { filter });
    toast(own.cleared(count(done.deleted.length + done.not_in_log)), "good", { title: own.undo, run: () => attempt(async () => {
      const back = await post("retained/restore", {}, { deleted: done.deleted });
      toast(own.restored(count(back.restored), count(back.not_restored.length)), back.not_restored.length ? "bad" : "good");
    }) });
  });
}
