/** Small parts of screens. */
import { ago, time, utc } from "../format.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { text } from "../text.js";

/** A moment: local time, with UTC and the distance on hover. @param {{us: number, fine?: boolean}} props */
export function Time({ us, fine = false }) {
  if (!us) return html`<span class="faint">–</span>`;
  return html`<time class="num" title=${`${utc(us)} · ${text.ago(ago(us))}`} datetime=${utc(us)}>${time(us, fine)}</time>`;
}

/** The head of a screen: its title, a line about it, and its controls on the right.
 * @param {{title: any, note?: any, children?: any}} props */
export const Head = ({ title, note, children }) => html`<header class="head"><div><h1>${title}</h1>${note && html`<p class="note">${note}</p>`}</div>
  <div class="controls">${children}</div></header>`;

/** A framed part of a screen. @param {{title?: any, aside?: any, class?: string, children?: any}} props */
export const Card = ({ title, aside, class: kind = "", children }) => html`<section class=${"card " + kind}>
  ${title && html`<h2>${title}${aside && html`<span class="aside">${aside}</span>`}</h2>`}${children}</section>`;

/** A figure with its name. @param {{name: string, value: any, note?: any, kind?: string, href?: string}} props */
export const Figure = ({ name, value, note, kind = "", href }) => {
  const body = html`<span class="name">${name}</span><span class="value">${value}</span>${note && html`<span class="note">${note}</span>`}`;
  return href ? html`<a class=${"figure " + kind} href=${href}>${body}</a>` : html`<div class=${"figure " + kind}>${body}</div>`;
};

/** A word with a colour. @param {{kind?: "good" | "warn" | "bad" | "info" | "", children?: any, title?: string}} props */
export const Badge = ({ kind = "", children, title }) => html`<span class=${"badge " + kind} title=${title}>${children}</span>`;

/** Names and values. @param {{rows: [any, any][]}} props */
export const Facts = ({ rows }) => html`<dl class="facts">${rows
  .filter(([, value]) => value != null && value !== "" && value !== false)
  .map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

/** What a request has come to: waiting, refused, or nodes that did not reply. Shown above old data.
 * `second`: another part of the screen names the nodes already.
 * @param {{of: import("../load.js").Loaded<any>, second?: boolean}} props */
export function State({ of: { data, error, loading }, second }) {
  if (error) return html`<p class="notice bad" role="alert">${error.message}</p>`;
  if (loading && !data) return html`<p class="notice faint">${text.loading}</p>`;
  const missing = !second && data?.missing?.map((/** @type {any} */ each) => text.missing(each.node, each.reason)).join(" ");
  return missing ? html`<p class="notice warn">${missing}</p>` : null;
}

/** An input whose value is told a moment after the last key.
 * @param {{label: string, value: string, onValue: (value: string) => void, placeholder?: string, search?: boolean, class?: string, list?: string}} props */
export function Field({ label, value, onValue, placeholder = label, search = false, class: kind = "", list }) {
  const [typed, setTyped] = useState(value);
  const timer = useRef(0);
  useEffect(() => setTyped(value), [value]);
  const tell = (/** @type {string} */ next) => { clearTimeout(timer.current); if (next !== value) onValue(next); };
  return html`<input class=${kind} type=${search ? "search" : "text"} data-search=${search ? "" : undefined} aria-label=${label} title=${label}
    placeholder=${placeholder} value=${typed} list=${list} spellcheck=${false} autocomplete="off"
    onInput=${(/** @type {any} */ event) => { const next = event.target.value; setTyped(next); clearTimeout(timer.current); timer.current = window.setTimeout(() => tell(next), 400); }}
    onKeyDown=${(/** @type {KeyboardEvent} */ event) => event.key === "Enter" && tell(typed)} />`;
}

/** A choice. @param {{label: string, value: string, options: [string, string][], onValue: (value: string) => void}} props */
export const Choice = ({ label, value, options, onValue }) => html`<select aria-label=${label} title=${label} value=${value}
  onChange=${(/** @type {any} */ event) => onValue(event.target.value)}>${options.map(([key, name]) => html`<option value=${key} selected=${key === value}>${name}</option>`)}</select>`;

/** Tabs whose choice is in the URL. @param {{tabs: [string, string][], value: string, onValue: (value: string) => void}} props */
export const Tabs = ({ tabs, value, onValue }) => html`<div class="tabs" role="group">${tabs.map(([key, name]) => html`
  <button aria-pressed=${key === value} onClick=${() => onValue(key)}>${name}</button>`)}</div>`;

/** A command, with a button that copies it. @param {{command: string, title?: string}} props */
export function Command({ command, title }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard?.writeText(command).then(() => { setCopied(true); setTimeout(() => setCopied(false), 2000); });
  return html`<div class="command">${title && html`<span class="name">${title}</span>`}<pre tabindex="0">${command}</pre>
    ${navigator.clipboard && html`<button onClick=${copy}>${copied ? text.copied : text.copy}</button>`}</div>`;
}
