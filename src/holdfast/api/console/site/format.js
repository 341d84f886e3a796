/** Numbers, sizes and times for people. Times of the API are microseconds since 1970. */

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 12,345 @param {number} value */
export const count = (value) => whole.format(Math.round(value));

/** 12.3K @param {number} value */
export const compact = (value) => (Math.abs(value) < 10000 ? whole.format(Math.round(value * 10) / 10) : short.format(value));

/** 1.2 MB @param {number} value */
export function bytes(value) {
  if (value < 1000) return `${Math.round(value)} B`;
  const power = Math.min(4, Math.floor(Math.log10(value) / 3));
  const scaled = value / 1000 ** power;
  return `${scaled.toFixed(scaled < 10 ? 1 : 0)} ${"kMGT"[power - 1]}B`;
}

/** 250 ms, 12 s, 3 min 5 s, 2 h 10 min, 4 d 3 h @param {number} seconds */
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const units = /** @type {[number, string][]} */ ([[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]);
  const at = units.findIndex(([size]) => seconds >= size);
  const [size, name] = units[at];
  const first = Math.floor(seconds / size);
  const [next, nextName] = units[at + 1] || [1, ""];
  const rest = Math.floor((seconds - first * size) / next);
  return nextName && rest && first < 10 ? `${first} ${name} ${rest} ${nextName}` : `${first} ${name}`;
}

const two = (/** @type {number} */ value) => String(value).padStart(2, "0");

/** The local day. @param {Date} date */
const day = (date) => `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;

/** The local time, with its date unless it is today's. @param {number} us @param {boolean} [fine] with ms */
export function time(us, fine = false) {
  if (!us) return "–";
  const date = new Date(us / 1000);
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const ms = fine ? "." + String(date.getMilliseconds()).padStart(3, "0") : "";
  return (day(date) === day(new Date()) ? "" : day(date) + " ") + clock + ms;
}

/** The time in UTC with microseconds, as commands take it. @param {number} us */
export function utc(us) {
  const date = new Date(us / 1000);
  if (Number.isNaN(date.getTime())) return `${us} µs`;
  return date.toISOString().slice(0, -1) + String(us % 1000).padStart(3, "0") + "Z";
}

/** How long ago. @param {number} us */
export const ago = (us) => duration(Math.max(0, Date.now() / 1000 - us / 1e6));

/** The value of `<input type="datetime-local">`. @param {number} us */
export function localInput(us) {
  const date = new Date(us / 1000);
  return `${day(date)}T${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
