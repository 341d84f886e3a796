/** The failover timeline: nodes, leaders, in-sync sets and publishes on one axis of time, and what
 * happened in a chosen span in words. */
import { get } from "../api.js";
import { useEvents } from "../events.js";
import { compact, duration, time } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../lib.js";
import { useLoad } from "../load.js";
import { Card, Choice, Head, State } from "../parts/basics.js";
import { path as curve, inside, ticks, useWidth } from "../parts/chart.js";
import { History, story } from "../parts/history.js";
import { change, route } from "../router.js";
import { text } from "../text.js";
import { hue } from "./cluster.js";

const own = text.timeline;
export const path = "timeline";
export const title = own.title;
export const scope = "viewer";

/** @typedef {[number, number]} Span @typedef {{t: number[], v: (number | null)[]}} Line */
const GUTTER = 112, LANE = 26, CHART = 76, GAP = 30, S = 1e6;
const history = new History();

/** The history, kept up to date. What is known stays known when a node dies. */
function useHistory() {
  const [version, setVersion] = useState(history.version);
  const [error, setError] = useState(/** @type {any} */ (null));
  const busy = useRef(false);
  const load = async () => {
    if (busy.current || document.hidden) return;
    busy.current = true;
    try {
      history.add(await get("timeline", { since_us: history.since }));
      setError(null);
      setVersion(history.version);
    } catch (refusal) {
      setError(refusal);
    } finally {
      busy.current = false;
    }
  };
  useEffect(() => {
    load();
    const timer = setInterval(load, 1000);
    return () => clearInterval(timer);
  }, []);
  useEvents((batch) => void ((batch.leaders || batch.nodes) && load()));
  return { version, error };
}

export function component() {
  const { version, error } = useHistory();
  const cluster = useLoad("cluster", {}, { every: 2 });
  const params = route.value.params;
  const seconds = Number(params.seconds) || 120;
  const end = Number(params.end) || history.now || Date.now() * 1000;
  const view = /** @type {Span} */ ([end - seconds * S, end]);
  const span = /** @type {Span | null} */ (params.from ? [Number(params.from), Number(params.to)] : null);
  const found = cluster.data;
  const lanes = useMemo(() => history.lanes(found), [version, found]);
  const told = useMemo(() => story(history, lanes, span || view, found), [version, found, params.from, params.to, seconds, params.end]);
  const choose = (/** @type {Span | null} */ chosen) => change(chosen ? { from: Math.round(chosen[0]), to: Math.round(chosen[1]), end: params.end || Math.round(end) } : { from: null, to: null, end: null }, true);
  const zoom = () => span && change({ seconds: Math.max(2, Math.ceil((span[1] - span[0]) / S)), end: Math.round(span[1]), from: null, to: null });
  return html`<${Head} title=${title} note=${own.note}>
      ${span && html`<button onClick=${zoom}>${own.zoom}</button>`}
      <${Choice} label=${own.range} value=${String(seconds)} onValue=${(/** @type {string} */ value) => change({ seconds: value })}
        options=${[...new Set([30, 60, 120, 300, 600, seconds])].sort((a, b) => a - b).map((each) => [String(each), own.last(duration(each))])} />
      <button class=${params.end ? "primary" : ""} aria-pressed=${!params.end} onClick=${() => change(params.end ? { end: null, from: null, to: null } : { end: Math.round(end) })}>${params.end ? own.goOn : own.pause}</button><//>
    ${error ? html`<p class="notice bad" role="alert">${error.message}</p>` : html`<${State} of=${{ data: history, error: null, loading: !history.now, reload: zoom }} />`}
    <div class=${"health " + (told.kind || "good")} role="status"><p>${told.head}</p>${told.sub && html`<p>${told.sub}</p>`}</div>
    <section class="card"><${Picture} lanes=${lanes} view=${view} span=${span} onSpan=${choose} min=${found?.min_insync || 1} factor=${found?.replication_factor || 1} /></section>
    <${Card} title=${span ? own.inSpan(time(span[0], true), duration((span[1] - span[0]) / S)) : own.inView} aside=${span ? html`<button class="plain" onClick=${() => choose(null)}>${own.clear}</button>` : own.brush}>
      ${told.lines.length ? html`<ol class="story">${told.lines.map((line) => html`<li class=${line.kind}><time class="num" title=${line.at}>${line.when}</time><span>${line.text}</span></li>`)}</ol>` : html`<p class="note">${own.calm}</p>`}<//>`;
}

/** @param {{lanes: any, view: Span, span: Span | null, onSpan: (span: Span | null) => void, min: number, factor: number}} props */
function Picture({ lanes, view, span, onSpan, min, factor }) {
  const [place, width] = useWidth(280);
  const [drag, setDrag] = useState(/** @type {Span | null} */ (null));
  const gutter = width < 600 ? 64 : GUTTER;
  const inner = width - gutter - 2;
  const x = (/** @type {number} */ at) => gutter + Math.max(0, Math.min(1, (at - view[0]) / (view[1] - view[0]))) * inner;
  const at = (/** @type {MouseEvent} */ event) => {
    const box = place.current.getBoundingClientRect();
    return view[0] + Math.max(0, Math.min(1, (event.clientX - box.left - gutter) / inner)) * (view[1] - view[0]);
  };
  const names = lanes.names;
  const rows = lanes.partitions.length;
  const row = rows > 40 ? 5 : rows > 20 ? 9 : 13;
  const nodesTop = 22, partitionsTop = nodesTop + names.length * LANE + GAP;
  const chartsTop = partitionsTop + (rows ? rows * row + GAP : 0);
  const height = chartsTop + 2 * (CHART + GAP);
  const bar = (/** @type {any} */ piece, /** @type {number} */ y, /** @type {number} */ tall, /** @type {string} */ kind, /** @type {string} */ tip) => {
    const left = x(piece.from), right = x(piece.to ?? view[1]);
    return piece.from < view[1] && (piece.to ?? view[1]) > view[0] && html`<rect class=${kind} x=${left} y=${y} width=${Math.max(1.5, right - left)} height=${tall} rx=${Math.min(4, tall / 2)}><title>${tip}</title></rect>`;
  };
  const published = names.map((/** @type {string} */ node) => lanes.figures(node, "published_per_s", view));
  const refused = names.map((/** @type {string} */ node) => lanes.figures(node, "refused", view));
  const p99 = names.map((/** @type {string} */ node) => lanes.figures(node, "acknowledge_p99_ms", view));
  const waits = names.map((/** @type {string} */ node) => lanes.figures(node, "waits_ms", view));
  const top = (/** @type {Line[]} */ lines, /** @type {number} */ least) => Math.max(least, ...lines.flatMap((/** @type {Line} */ line) => line.v.map((value) => value || 0)));
  const most = top(published, 1), slow = top([...p99, ...waits], 10);
  const log = (/** @type {number} */ value) => Math.log10(1 + value) / Math.log10(1 + slow);
  const second = chartsTop + CHART + GAP;
  const move = (/** @type {PointerEvent} */ event) => drag && setDrag([drag[0], at(event)]);
  const done = () => {
    if (drag) onSpan(Math.abs(drag[1] - drag[0]) / (view[1] - view[0]) > 0.004 ? [Math.min(...drag), Math.max(...drag)] : null);
    setDrag(null);
  };
  const shown = drag || span;
  const label = (/** @type {number} */ y, /** @type {string} */ word) => html`<text class="label" x="0" y=${y}>${word}</text>`;
  return html`<p class="legend note"><span><i class="key up"></i>${own.states.up}</span><span><i class="key suspected"></i>${own.states.suspected}</span><span><i class="key down"></i>${own.states.down}</span><span><i class="key crown"></i>${own.crown}</span>
    <span><i class="key short"></i>${own.short}</span><span><i class="key area"></i>${own.waiting}</span></p>
  <div class="picture" ref=${place}><svg width=${width} height=${height} role="img" aria-label=${own.picture}
      onPointerDown=${(/** @type {PointerEvent} */ event) => { if (event.button === 0) { /** @type {Element} */ (event.currentTarget).setPointerCapture(event.pointerId); setDrag([at(event), at(event)]); } }} onPointerMove=${move} onPointerUp=${done} onPointerCancel=${() => setDrag(null)}>
    ${ticks(view[0] / S, view[1] / S, inner).map((tick) => html`<line class="tick" x1=${x(tick.at * S)} x2=${x(tick.at * S)} y1="14" y2=${height - GAP + 6} /><text class="axis" x=${inside(x(tick.at * S), tick.name, width)} y=${height - 8} text-anchor="middle">${tick.name}</text>`)}
    ${label(11, own.nodes)}
    ${names.map((/** @type {string} */ node, /** @type {number} */ index) => { const y = nodesTop + index * LANE; return html`
      <text class="name" x="0" y=${y + 13}>${node}</text><rect class=${"dot " + hue(node, names)} x=${gutter - 18} y=${y + 3} width="10" height="10" rx="3" />
      ${lanes.nodes[node].map((/** @type {any} */ piece) => bar(piece, y, 16, `state ${piece.value} ${hue(node, names)}`, `${node}: ${own.states[/** @type {"up"} */ (piece.value)] || piece.value} · ${time(piece.from, true)}`))}
      ${lanes.metadata.filter((/** @type {any} */ piece) => piece.value === node).map((/** @type {any} */ piece) => bar(piece, y + 6.5, 3, "crown", own.metadata(node)))}`; })}
    ${rows > 0 && label(partitionsTop - 9, own.partitions)}
    ${lanes.partitions.map((/** @type {any} */ lane, /** @type {number} */ number) => { const y = partitionsTop + number * row; return html`
      ${row > 8 && html`<text class="axis" x=${gutter - 8} y=${y + row - 4} text-anchor="end">${number}</text>`}
      ${lane.leads.map((/** @type {any} */ piece) => bar(piece, y, row - (row > 8 ? 5 : 2), `state ${piece.leader ? "led " + hue(piece.leader, names) : "none"}`, own.led(number, piece.leader, piece.epoch)))}
      ${row > 8 && lane.sync.map((/** @type {any} */ piece) => piece.sync.length < factor && bar(piece, y + row - 4, 2.5, piece.sync.length < min ? "short bad" : "short", own.synced(piece.sync)))}`; })}
    ${label(chartsTop - 9, own.published)}<text class="axis" x=${gutter - 8} y=${chartsTop + 8} text-anchor="end">${compact(Math.ceil(most))}/s</text>
    <line class="base" x1=${gutter} x2=${width} y1=${chartsTop + CHART} y2=${chartsTop + CHART} />
    ${published.map((/** @type {Line} */ line, /** @type {number} */ index) => html`<path class=${"line " + hue(names[index], names)} d=${curve(line.t, line.v, x, (value) => chartsTop + CHART - (value / most) * (CHART - 6), 2.5 * S)} />`)}
    ${refused.map((/** @type {Line} */ line) => line.t.map((when, index) => (line.v[index] || 0) > 0 && html`<rect class="refused" x=${x(when) - 3} y=${chartsTop + CHART - 10} width="4" height="10"><title>${own.refusedAt(line.v[index])}</title></rect>`))}
    ${label(second - 9, own.acknowledged)}${[1, 10, 100, 1000, 10000].filter((value) => value <= slow).map((value) => html`<text class="axis" x=${gutter - 8} y=${second + CHART - log(value) * (CHART - 6) + 4} text-anchor="end">${duration(value / 1000)}</text>
      <line class="tick" x1=${gutter} x2=${width} y1=${second + CHART - log(value) * (CHART - 6)} y2=${second + CHART - log(value) * (CHART - 6)} />`)}
    <line class="base" x1=${gutter} x2=${width} y1=${second + CHART} y2=${second + CHART} />
    ${waits.map((/** @type {Line} */ line, /** @type {number} */ index) => html`<path class=${"area " + hue(names[index], names)} d=${area(line, x, (value) => second + CHART - log(value) * (CHART - 6), second + CHART)} />`)}
    ${p99.map((/** @type {Line} */ line, /** @type {number} */ index) => html`<path class=${"line " + hue(names[index], names)} d=${curve(line.t, line.v, x, (value) => second + CHART - log(value) * (CHART - 6), 2.5 * S)} />`)}
    ${shown && html`<rect class="brush" x=${x(Math.min(...shown))} y="14" width=${Math.max(1, x(Math.max(...shown)) - x(Math.min(...shown)))} height=${height - GAP - 8} rx="3" />`}
  </svg></div>`;
}

/** The area below steps; 0 is not drawn. @param {Line} line @param {(at: number) => number} x @param {(value: number) => number} y @param {number} base */
function area({ t, v }, x, y, base) {
  return t.map((at, index) => (v[index] || 0) > 25 ? `M${x(at - 5e5).toFixed(1)},${base}V${y(v[index] || 0).toFixed(1)}H${x(at).toFixed(1)}V${base}Z` : "").join("");
}
