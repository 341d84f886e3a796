/** The federation: all members and links, round trips and queues, and the way of one topic. */
import { bytes, count, duration } from "../format.js";
import { html, useMemo } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Card, Facts, Field, Figure, Head, State } from "../parts/basics.js";
import { place } from "../parts/layout.js";
import { Table } from "../parts/table.js";
import { change, route } from "../router.js";
import { text } from "../text.js";

const own = text.federation;
export const path = "federation";
export const title = own.title;
export const scope = "viewer";
const W = 760, H = 420;

/** The members and the links between them, with their places. @param {any} graph */
function placed(graph) {
  const ids = graph.members.map((/** @type {any} */ each) => each.id);
  const links = graph.links.filter((/** @type {any} */ each) => ids.includes(each.a) && ids.includes(each.b));
  const places = place(ids, links.map((/** @type {any} */ each) => [each.a, each.b]), W, H, [70, 46]);
  return { members: graph.members.map((/** @type {any} */ each) => ({ ...each, ...places.get(each.id) })), links: links.map((/** @type {any} */ each) => ({ ...each, source: places.get(each.a), target: places.get(each.b) })) };
}

export function component() {
  const topic = route.value.params.topic || "";
  // A broker without a federation is not asked for one, because the browser would log each 404.
  const settings = useLoad("settings");
  const isMember = settings.data && !settings.data.settings.some((/** @type {any} */ each) => each.key === "federation" && each.value === null);
  const status = useLoad(isMember ? "federation" : null, { topic }, { every: 2 });
  const graph = useLoad(isMember ? "federation/graph" : null, {}, { every: 5 });
  const shape = JSON.stringify(graph.data && [graph.data.members.map((/** @type {any} */ each) => each.id), graph.data.links]);
  const picture = useMemo(() => graph.data && placed(graph.data), [shape]);
  const found = status.data;
  const head = html`<${Head} title=${title} note=${found && own.note(found.federation, graph.data?.members.length || 0)}>
    <${Field} search class="wide" label=${own.topic} value=${topic} onValue=${(/** @type {string} */ value) => change({ topic: value })} /><//>`;
  if (!found || !picture) return html`${head}${isMember === false || status.error?.status === 404 ? html`<p class="notice">${own.none}</p>` : html`<${State} of=${isMember ? status : settings} />`}`;
  const names = found.names || {};
  const name = (/** @type {string} */ id) => names[id] || graph.data.members.find((/** @type {any} */ each) => each.id === id)?.name || id.slice(0, 8);
  const mesh = topic && found.mesh?.members ? found.mesh : null;
  const links = found.links || [];
  const queued = found.custody?.queued || {};
  const slow = links.filter((/** @type {any} */ each) => !each.usable);
  return html`${head}<${State} of=${status} />
    <div class=${"health " + (found.running && !slow.length && !found.problems.length ? "good" : "warn")} role="status"><p>${!found.running ? own.stopped(found.failure)
      : slow.length ? own.unusable(slow.map((/** @type {any} */ each) => name(each.id)).join(", ")) : own.fine(links.length)}</p>${found.problems?.map((/** @type {string} */ each) => html`<p>${each}</p>`)}</div>
    <div class="figures"><${Figure} name=${own.members} value=${count(picture.members.length)} /><${Figure} name=${own.queued} value=${count(found.custody?.messages || 0)} note=${bytes(found.custody?.bytes || 0)} kind=${found.custody?.disk_full ? "bad" : ""} />
      <${Figure} name=${own.published} value=${count(found.counters?.published || 0)} /><${Figure} name=${own.delivered} value=${count(found.counters?.delivered || 0)} /></div>
    <${Card} title=${own.graph} aside=${mesh ? own.meshOf(mesh.members.length) : own.graphNote}><${Graph} picture=${picture} mesh=${mesh} me=${graph.data.id} name=${name} links=${links} queued=${queued} />
      ${topic && mesh && !mesh.members.length && html`<p class="notice">${own.nobody}</p>`}<//>
    <${Card} title=${own.links}><${Table} label=${own.links} rows=${links} rowKey=${(/** @type {any} */ row) => row.id} empty=${own.noLinks} columns=${[
      { key: "n", title: own.member, cell: (/** @type {any} */ row) => html`${name(row.id)} ${!row.usable && html`<${Badge} kind="warn">${own.notUsed}<//>`}` },
      { key: "r", title: own.roundTrip, align: "right", cell: (/** @type {any} */ row) => row.rtt_ms == null ? "–" : `${row.rtt_ms.toFixed(2)} ms` },
      { key: "q", title: own.queued, align: "right", cell: (/** @type {any} */ row) => count(queued[row.id] || 0) },
      { key: "b", title: own.unsent, align: "right", minor: true, cell: (/** @type {any} */ row) => bytes(row.unsent_bytes) },
      { key: "u", title: own.up, align: "right", minor: true, cell: (/** @type {any} */ row) => duration(row.up_s) },
      { key: "a", title: own.address, minor: true, cell: (/** @type {any} */ row) => row.remote }]} />
      <${Facts} rows=${[[own.wants, count(found.interest?.local || 0)], [own.othersWant, count(found.interest?.remote || 0)], [own.manager, found.manager?.url]]} /><//>`;
}

/** @param {{picture: any, mesh: any, me: string, name: (id: string) => string, links: any[], queued: Record<string, number>}} props */
function Graph({ picture, mesh, me, name, links, queued }) {
  const lit = new Set(Object.entries(mesh?.parents || {}).map(([a, b]) => [a, b].sort().join("/")));
  return html`<svg class="web" viewBox=${`0 0 ${W} ${H}`} role="img" aria-label=${own.graph}>
    ${picture.links.map((/** @type {any} */ each) => {
      const a = each.source, b = each.target, link = links.find((one) => (each.a === me && one.id === each.b) || (each.b === me && one.id === each.a));
      return html`<line class=${`edge ${lit.has([each.a, each.b].sort().join("/")) ? "lit" : ""} ${each.mutual && (!link || link.usable) ? "" : "half"}`} x1=${a.x} y1=${a.y} x2=${b.x} y2=${b.y}><title>${name(each.a)} – ${name(each.b)}</title></line>
        ${link?.rtt_ms != null && html`<text class="rtt" x=${(a.x + b.x) / 2} y=${(a.y + b.y) / 2 + 4} text-anchor="middle">${link.rtt_ms.toFixed(1)} ms</text>`}`;
    })}
    ${picture.members.map((/** @type {any} */ each) => html`<g transform=${`translate(${each.x} ${each.y})`} class=${`member ${each.id === me ? "me" : ""} ${mesh?.members.includes(each.id) ? "lit" : ""}`}>
      <circle r="15" />${mesh?.root === each.id && html`<circle class="root" r="20" />`}<text class="name" y="33" text-anchor="middle">${name(each.id)}${each.id === me ? ` ${own.here}` : ""}</text>
      ${queued[each.id] > 0 && html`<text class="queued" y="-21" text-anchor="middle">${own.waits(count(queued[each.id]))}</text>`}<title>${name(each.id)}, ${each.address}, ${own.filters(each.filters)}</title></g>`)}</svg>`;
}
