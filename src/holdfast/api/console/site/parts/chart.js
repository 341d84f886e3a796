/** Charts over time (uPlot), and small bars. */
import { html, useEffect, useRef } from "../lib.js";
import { compact } from "../format.js";
import uPlot from "../vendor/uplot.js";

/** @typedef {{label: string, values: (number | null)[], color?: string, bars?: boolean, fill?: boolean, format?: (value: number) => string}} Series
 * `color`: the name of a CSS variable: c1 to c6, good, warn, bad */

/** The value of a colour of the style sheet, for a canvas. @param {Element} at @param {string} name */
function color(at, name) {
  // A registered property would be computed; a canvas wants the final colour.
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  at.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** A chart over time. A dragged span is told to `onSpan`.
 * @param {{x: number[], series: Series[], height?: number, label: string, format?: (value: number) => string,
 *   onSpan?: (fromS: number, toS: number) => void, from?: number, to?: number}} props `x`: seconds since 1970 */
export function Chart({ x, series, height = 160, label, format = compact, onSpan, from, to }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const span = useRef(onSpan);
  span.current = onSpan;
  const shape = JSON.stringify([series.map((each) => [each.label, each.color, each.bars, each.fill]), height, !!onSpan]);
  const data = /** @type {any} */ ([x, ...series.map((each) => each.values)]);
  const range = useRef([from, to]);
  range.current = [from, to];
  useEffect(() => {
    const node = /** @type {HTMLElement} */ (place.current);
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(node), data, node);
    };
    /** @param {HTMLElement} at @returns {any} */
    const options = (at) => ({
      width: at.clientWidth || 300, height, legend: { show: series.length > 1, live: false },
      cursor: { drag: { x: !!onSpan, y: false, setScale: false }, points: { size: 6 } },
      scales: { x: { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => [range.current[0] ?? low, range.current[1] ?? high] },
        y: { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.08 : 1] } },
      axes: [axis(at, { size: 28 }), axis(at, { size: 52, values: (/** @type {any} */ _, /** @type {number[]} */ all) => all.map(format) })],
      series: [{}, ...series.map((each, index) => {
        const stroke = color(at, each.color || `c${index + 1}`);
        return { label: each.label, stroke, width: each.bars ? 0 : 1.6, points: { show: false },
          fill: each.bars ? stroke : each.fill ? stroke.replace(/\)$/, " / 0.14)").replace(/^rgb\((\d+), (\d+), (\d+)/, "rgb($1 $2 $3") : undefined,
          paths: each.bars ? uPlot.paths.bars({ size: [0.82, 60], align: 1 }) : undefined,
          value: (/** @type {any} */ _, /** @type {number} */ value) => value == null ? "–" : (each.format || format)(value) };
      })],
      hooks: { setSelect: [(/** @type {any} */ own) => {
        if (own.select.width < 3) return;
        span.current?.(own.posToVal(own.select.left, "x"), own.posToVal(own.select.left + own.select.width, "x"));
        own.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }] },
    });
    make();
    const sized = new ResizeObserver(() => node.clientWidth && plot.current.setSize({ width: node.clientWidth, height }));
    sized.observe(node);
    const themed = new MutationObserver(make);
    themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", make);
    return () => {
      sized.disconnect();
      themed.disconnect();
      media.removeEventListener("change", make);
      plot.current.destroy();
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(data));
  return html`<div class="chart" ref=${place} role="img" aria-label=${label}></div>`;
}

/** @param {Element} at @param {object} more */
const axis = (at, more) => ({ stroke: color(at, "faint"), font: "11px system-ui", grid: { stroke: color(at, "line"), width: 1 },
  ticks: { show: false }, gap: 6, ...more });

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
