/** The drawer beside a table, and questions before an action. */
import { html, signal, useEffect, useRef } from "../lib.js";
import { text } from "../text.js";

/** A panel about one row. Escape closes it, and the focus returns to where it was.
 * @param {{title: any, onClose: () => void, children?: any}} props */
export function Drawer({ title, onClose, children }) {
  const panel = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const before = /** @type {HTMLElement | null} */ (document.activeElement);
    panel.current?.focus();
    return () => before?.isConnected && before.focus();
  }, []);
  return html`<aside class="drawer" ref=${panel} tabindex="-1" aria-label=${text.details}
    onKeyDown=${(/** @type {KeyboardEvent} */ event) => event.key === "Escape" && onClose()}>
    <header><h2>${title}</h2><button class="plain" aria-label=${text.close} onClick=${onClose}>✕</button></header>
    <div class="content">${children}</div></aside>`;
}

/** @typedef {{title: string, body?: any, action: string, danger?: boolean, resolve: (value: any) => void,
 *   fields?: {name: string, label: string, value?: string, type?: string, options?: [string, string][]}[]}} Question */
/** @type {import("../vendor/signals.js").Signal<Question | null>} */
const question = signal(/** @type {Question | null} */ (null));

/** Ask before an action. The result has the values of the fields by name, or is null if the user
 * does not want it. `body` may be any content, for example the plan of what would happen.
 * @param {Omit<Question, "resolve">} asked @returns {Promise<Record<string, string> | null>} */
export function ask(asked) {
  return new Promise((resolve) => (question.value = { ...asked, resolve }));
}

export function Questions() {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const asked = question.value;
  useEffect(() => void (asked && dialog.current?.showModal()), [asked]);
  if (!asked) return null;
  const end = (/** @type {any} */ value) => { question.value = null; asked.resolve(value); };
  const submit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    end(Object.fromEntries(new FormData(/** @type {HTMLFormElement} */ (event.target))));
  };
  return html`<dialog ref=${dialog} aria-label=${asked.title} onCancel=${() => end(null)}><form onSubmit=${submit}>
    <h2>${asked.title}</h2><div class="content">${asked.body}
    ${asked.fields?.map((field) => html`<label>${field.label}${field.options
      ? html`<select name=${field.name}>${field.options.map(([key, name]) => html`<option value=${key} selected=${key === field.value}>${name}</option>`)}</select>`
      : html`<input name=${field.name} type=${field.type || "text"} value=${field.value || ""} step="any" autocomplete="off" />`}</label>`)}</div>
    <div class="buttons"><button type="button" onClick=${() => end(null)}>${text.cancel}</button>
      <button class=${asked.danger ? "danger" : "primary"}>${asked.action}</button></div></form></dialog>`;
}
