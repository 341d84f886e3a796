/** Charts over time as SVG, in the colours of the style sheet, and small bars. */
import { compact, time } from "../format.js";
import { html, useEffect, useRef, useState } from "../lib.js";

/** @typedef {{label: string, values: (number | null)[], color?: string, bars?: boolean, fill?: boolean, format?: (value: number) => string}} Series
 * `color`: the name of a CSS variable: c1 to c6, good, warn, bad */

const LEFT = 52, TOP = 8, BOTTOM = 22;

/** The width of an element, as it is now. @param {number} least @returns {[any, number]} its ref, the width */
export function useWidth(least = 200) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const [width, setWidth] = useState(800);
  useEffect(() => {
    const node = /** @type {HTMLElement} */ (place.current);
    const sized = new ResizeObserver(() => setWidth(Math.max(least, node.clientWidth)));
    sized.observe(node);
    return () => sized.disconnect();
  }, []);
  return [place, width];
}

/** Whole times for an axis, about 88 pixels apart. @param {number} from @param {number} to seconds since 1970 @param {number} width */
export function ticks(from, to, width) {
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 10800, 21600, 86400].find((each) => each >= (to - from) * (88 / width)) || 604800;
  // Local midnight is a tick of long spans.
  const zone = new Date(from * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((from - zone) / step) * step + zone; at < to; at += step) found.push(at);
  return found.map((at) => ({ at, name: step >= 86400 ? time(at * 1e6).split(" ")[0] : time(at * 1e6).slice(0, step < 60 ? undefined : -3) }));
}

/** The middle of a label of an axis, moved so far that its end is not cut off.
 * @param {number} at @param {string} name @param {number} width */
export const inside = (at, name, width) => Math.min(at, width - name.length * 3.5);

/** The path of a line, broken where a value is missing or `gap` is exceeded.
 * @param {number[]} x @param {(number | null)[]} values @param {(x: number) => number} across @param {(value: number) => number} up @param {number} [gap] */
export function path(x, values, across, up, gap = Infinity) {
  let found = "", last = -Infinity;
  x.forEach((at, index) => {
    const value = values[index];
    if (value == null) last = -Infinity;
    else {
      found += `${last === -Infinity || at - last > gap ? "M" : "L"}${across(at).toFixed(1)},${up(value).toFixed(1)}`;
      last = at;
    }
  });
  return found;
}

/** A chart over time. A dragged span is told to `onSpan`.
 * @param {{x: number[], series: Series[], height?: number, label: string, format?: (value: number) => string,
 *   onSpan?: (fromS: number, toS: number) => void, from?: number, to?: number}} props `x`: seconds since 1970 */
export function Chart({ x, series, height = 160, label, format = compact, onSpan, from, to }) {
  const [place, width] = useWidth();
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const [begun, setBegun] = useState(/** @type {number | null} */ (null));
  const low = from ?? x[0] ?? 0, high = Math.max(low + 1, to ?? x.at(-1) ?? 1), inner = width - LEFT - 4, base = height - BOTTOM;
  const most = Math.max(...series.flatMap((each) => each.values.map((value) => value || 0)), 1e-9);
  const unit = 10 ** Math.floor(Math.log10(most)), step = [0.5, 1, 2, 5].map((each) => each * unit).find((each) => most / each <= 4) || unit;
  const top = Math.max(most * 1.05, step);
  const across = (/** @type {number} */ when) => LEFT + ((when - low) / (high - low)) * inner;
  const up = (/** @type {number} */ value) => base - (value / top) * (base - TOP);
  const when = (/** @type {PointerEvent} */ event) => low + Math.max(0, Math.min(1, (event.clientX - place.current.getBoundingClientRect().left - LEFT) / inner)) * (high - low);
  const near = at == null || !x.length ? -1 : x.reduce((best, each, index) => Math.abs(each - at) < Math.abs(x[best] - at) ? index : best, 0);
  const color = (/** @type {Series} */ each, /** @type {number} */ index) => ({ color: `var(--${each.color || `c${index + 1}`})` });
  const lines = Math.floor(top / step + 1e-9);
  const wide = Math.max(1, (inner / Math.max(1, x.length)) * 0.82);
  const end = (/** @type {PointerEvent} */ event) => {
    const to = when(event);
    if (begun != null && onSpan && Math.abs(across(to) - across(begun)) > 3) onSpan(Math.min(begun, to), Math.max(begun, to));
    setBegun(null);
  };
  return html`<div class="chart" ref=${place}><svg width=${width} height=${height} role="img" aria-label=${label} class=${onSpan ? "spans" : ""}
      onPointerMove=${(/** @type {PointerEvent} */ event) => setAt(when(event))} onPointerLeave=${() => setAt(null)} onPointerCancel=${() => setBegun(null)} onPointerUp=${end}
      onPointerDown=${(/** @type {PointerEvent} */ event) => { if (!onSpan || event.button) return; /** @type {Element} */ (event.currentTarget).setPointerCapture(event.pointerId); setBegun(when(event)); }}>
    ${Array.from({ length: lines + 1 }, (_, index) => html`<line class="tick" x1=${LEFT} x2=${width} y1=${up(index * step)} y2=${up(index * step)} /><text x=${LEFT - 7} y=${up(index * step) + 4} text-anchor="end">${format(index * step)}</text>`)}
    ${x.length > 0 && ticks(low, high, inner).map((each) => html`<line class="tick" x1=${across(each.at)} x2=${across(each.at)} y1=${TOP} y2=${base} /><text x=${inside(across(each.at), each.name, width)} y=${height - 5} text-anchor="middle">${each.name}</text>`)}
    ${series.map((each, index) => html`<g style=${color(each, index)}>${each.bars
      ? x.map((one, at) => (each.values[at] || 0) > 0 && html`<rect class="bar" x=${across(one)} y=${up(each.values[at] || 0)} width=${wide} height=${base - up(each.values[at] || 0)} />`)
      : html`${each.fill && x.length > 1 && html`<path class="under" d=${`${path(x, each.values.map((value) => value || 0), across, up).replace("M", `M${across(x[0])},${base}L`)}V${base}Z`} />`}<path class="curve" d=${path(x, each.values, across, up)} />`}</g>`)}
    ${begun != null && at != null ? html`<rect class="brush" x=${across(Math.min(begun, at))} y=${TOP} width=${Math.abs(across(at) - across(begun))} height=${base - TOP} />`
      : near >= 0 && html`<line class="base" x1=${across(x[near])} x2=${across(x[near])} y1=${TOP} y2=${base} />`}</svg>
    <p class="legend">${near >= 0 && html`<span>${time(x[near] * 1e6)}</span>`}${series.map((each, index) => html`<span><i class="key" style=${color(each, index)}></i>${each.label}${near >= 0 && html` <b>${each.values[near] == null ? "–" : (each.format || format)(/** @type {number} */ (each.values[near]))}</b>`}</span>`)}</p></div>`;
}

/** A small line without axes. @param {{values: number[], label: string}} props */
export function Spark({ values, label }) {
  const high = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${((index / Math.max(1, values.length - 1)) * 100).toFixed(1)},${(23 - (value / high) * 21).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${label}>
    ${points.length > 1 && html`<polyline points=${points.join(" ")} />`}</svg>`;
}

/** A share of a limit. @param {{value: number, of: number, label: string, kind?: string}} props */
export function Meter({ value, of, label, kind = "" }) {
  const share = of > 0 ? Math.min(1, value / of) : 0;
  const level = kind || (share > 0.9 ? "bad" : share > 0.7 ? "warn" : "");
  return html`<span class=${"meter " + level} role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax=${of} aria-valuenow=${value}
    ><i style=${{ width: `${share * 100}%` }}></i></span>`;
}
