/** Payloads in their forms, and the difference of two. */
import { urlOf } from "../api.js";
import { bytes } from "../format.js";
import { html } from "../lib.js";
import { text } from "../text.js";
import { Raw } from "./raw.js";

/** @typedef {{text?: string, base64?: string, bytes: number, is_cut?: boolean, content_type?: string, response_topic?: string,
 *   correlation_base64?: string, expiry_s?: number, user_properties?: [string, string][]}} Content */

const own = text.payload;

/** The bytes that are shown. @param {Content} content */
export function bytesOf(content) {
  if (content.base64) return Uint8Array.from(atob(content.base64), (each) => each.charCodeAt(0));
  return new TextEncoder().encode(content.text || "");
}

/** The value of a JSON payload, or undefined. @param {Content} content */
export function jsonOf(content) {
  if (!content.text || content.is_cut) return undefined;
  try {
    return JSON.parse(content.text);
  } catch {
    return undefined;
  }
}

/** The numbers and texts of a JSON value by path. @param {any} value @param {string} [prefix] @param {Map<string, any>} [found] */
export function leaves(value, prefix = "", found = new Map()) {
  if (found.size > 2000) return found;
  if (value === null || typeof value !== "object") return found.set(prefix, value);
  for (const [key, each] of Object.entries(value)) leaves(each, prefix ? `${prefix}.${key}` : key, found);
  return found;
}

/** The first characters, for a table. @param {{content: Content}} props */
export function Preview({ content }) {
  if (!content.bytes) return html`<span class="faint">${text.empty}</span>`;
  if (content.base64) return html`<span class="faint">${own.binary(bytes(content.bytes))}</span> <span class="mono">${[...bytesOf(content).slice(0, 12)].map(hex).join(" ")}</span>`;
  const shown = content.text || "";
  return content.is_cut ? html`<${Raw} value=${shown.slice(0, 100)} />…` : html`<${Raw} value=${shown} max=${110} />`;
}

const hex = (/** @type {number} */ byte) => byte.toString(16).padStart(2, "0");

/** @param {Content} content */
function hexLines(content) {
  const all = bytesOf(content);
  const lines = [];
  for (let at = 0; at < Math.min(all.length, 8192); at += 16) {
    const row = [...all.slice(at, at + 16)];
    const ascii = row.map((each) => (each > 31 && each < 127 ? String.fromCharCode(each) : "·")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${row.map(hex).join(" ").padEnd(48)} ${ascii}`);
  }
  return lines.join("\n");
}

/** What differs between two values. @param {{before: any, after: any}} props */
export function Difference({ before, after }) {
  const [old, now] = [leaves(before), leaves(after)];
  const rows = [...new Set([...old.keys(), ...now.keys()])].filter((key) => old.get(key) !== now.get(key));
  if (!rows.length) return html`<p class="faint">${own.same}</p>`;
  const shown = (/** @type {Map<string, any>} */ from, /** @type {string} */ key) => from.has(key) ? html`<${Raw} value=${JSON.stringify(from.get(key))} max=${80} />` : html`<span class="faint">–</span>`;
  return html`<table class="diff"><thead><tr><th>${own.path}</th><th>${own.before}</th><th>${own.after}</th></tr></thead><tbody>
    ${rows.slice(0, 200).map((key) => html`<tr><td><${Raw} value=${key} empty=${own.value} /></td><td class="old">${shown(old, key)}</td><td class="new">${shown(now, key)}</td></tr>`)}</tbody></table>`;
}

/** The forms that a payload has. @param {any} detail of `GET /api/v1/log/record` @returns {[string, string][]} */
export function formsOf(detail) {
  const { content } = detail.record;
  return /** @type {[string, string][]} */ ([
    detail.sparkplug && ["sparkplug", own.sparkplug], jsonOf(content) !== undefined && ["json", own.json],
    !content.base64 && ["text", own.text], ["hex", own.hex], detail.previous && ["diff", own.diff],
  ].filter(Boolean));
}

/** A payload in one form. @param {{detail: any, form: string}} props */
export function Payload({ detail, form }) {
  const { record, previous } = detail;
  const content = record.content;
  let body;
  if (form === "sparkplug") body = html`<pre tabindex="0"><${Raw} lines max=${20000} value=${JSON.stringify(detail.sparkplug, null, 2)} /></pre>`;
  else if (form === "json") body = html`<pre tabindex="0"><${Raw} lines max=${20000} value=${JSON.stringify(jsonOf(content), null, 2)} /></pre>`;
  else if (form === "hex") body = html`<pre tabindex="0">${hexLines(content)}</pre>`;
  else if (form === "diff") {
    const value = (/** @type {any} */ each, /** @type {any} */ decoded) => decoded ?? jsonOf(each.content) ?? each.content.text ?? each.content.base64;
    body = html`<${Difference} before=${value(previous, detail.previous_sparkplug)} after=${value(record, detail.sparkplug)} />`;
  } else body = html`<pre tabindex="0"><${Raw} lines max=${20000} value=${content.text || ""} /></pre>`;
  return html`${body}<p class="note">${content.is_cut ? own.cut(bytes(content.bytes)) : bytes(content.bytes)} ·${" "}
    <a href=${urlOf("log/payload", { partition: record.partition, offset: record.offset })} download>${own.download}</a></p>`;
}
