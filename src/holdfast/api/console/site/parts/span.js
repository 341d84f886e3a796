/** A span of time as a part of the URL: `range=1h` (the last hour, moving), or `from` and `to` in UTC. */
import { localInput, utc } from "../format.js";
import { html } from "../lib.js";
import { change, route } from "../router.js";
import { text } from "../text.js";

/** @type {Record<string, number>} */
const SECONDS = { "15m": 900, "1h": 3600, "6h": 21600, "24h": 86400, "7d": 604800 };

/** @typedef {{fromUs: number, toUs: number, isMoving: boolean}} Span `fromUs` 0: from the beginning; `toUs` 0: to the end */

/** The span that the URL names. @param {string} [usual] @returns {Span} */
export function spanOf(usual = "1h") {
  const { range, from, to } = route.value.params;
  if (from || to) return { fromUs: usOf(from), toUs: usOf(to), isMoving: !to };
  const seconds = SECONDS[range || usual];
  return { fromUs: seconds ? (Date.now() - seconds * 1000) * 1000 : 0, toUs: 0, isMoving: true };
}

/** @param {string | undefined} value a time in UTC or local */
function usOf(value) {
  if (!value) return 0;
  const ms = Date.parse(value);
  if (Number.isNaN(ms)) return 0;
  // Date has milliseconds only.
  const micro = /\.\d{3}(\d{3})/.exec(value);
  return ms * 1000 + (micro ? Number(micro[1]) : 0);
}

/** Put a span into the URL. @param {number} fromUs @param {number} toUs @param {boolean} [replace] */
export function setSpan(fromUs, toUs, replace = false) {
  change({ range: null, from: fromUs ? utc(Math.round(fromUs)) : null, to: toUs ? utc(Math.round(toUs)) : null, after: null }, replace);
}

/** The choice of a span. @param {{usual?: string}} props */
export function SpanChoice({ usual = "1h" }) {
  const { range, from, to } = route.value.params;
  const isOwn = !!(from || to);
  const { fromUs, toUs } = spanOf(usual);
  const set = (/** @type {"from" | "to"} */ which) => (/** @type {any} */ event) =>
    setSpan(which === "from" ? usOf(event.target.value) : fromUs, which === "to" ? usOf(event.target.value) : toUs);
  return html`<span class="span"><select aria-label=${text.span.label} value=${isOwn ? "own" : range || usual}
      onChange=${(/** @type {any} */ event) => event.target.value === "own" ? setSpan(fromUs || (Date.now() - 3600e3) * 1000, Date.now() * 1000) : change({ range: event.target.value, from: null, to: null, after: null })}>
      ${[...Object.keys(SECONDS), "all", "own"].map((key) => html`<option value=${key} selected=${key === (isOwn ? "own" : range || usual)}>${text.span[/** @type {"1h"} */ (key)]}</option>`)}</select>
    ${isOwn && html`<input type="datetime-local" step="1" aria-label=${text.span.from} value=${fromUs ? localInput(fromUs) : ""} onChange=${set("from")} />
      <input type="datetime-local" step="1" aria-label=${text.span.to} value=${toUs ? localInput(toUs) : ""} onChange=${set("to")} />`}</span>`;
}
