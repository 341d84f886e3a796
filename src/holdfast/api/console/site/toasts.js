/** Short notices: an action has been carried out or refused, a node is lost, the broker is back. */
import { html, signal } from "./lib.js";
import { text } from "./text.js";

/** @typedef {"good" | "bad" | "info"} Kind */
/** @typedef {{id: number, text: string, kind: Kind, action?: {title: string, run: () => any}}} Toast */
/** @type {import("./vendor/signals.js").Signal<Toast[]>} */
const toasts = signal(/** @type {Toast[]} */ ([]));
let last = 0;

/** Show a notice. A notice with an action (undo) stays for longer.
 * @param {string} message @param {Kind} [kind] @param {{title: string, run: () => any}} [action] */
export function toast(message, kind = "good", action) {
  if (toasts.value.some((each) => each.text === message)) return;
  const id = ++last;
  toasts.value = [...toasts.value.slice(-4), { id, text: message, kind, action }];
  setTimeout(() => dismiss(id), action ? 30000 : kind === "bad" ? 10000 : 5000);
}

/** @param {number} id */
const dismiss = (id) => (toasts.value = toasts.value.filter((each) => each.id !== id));

/** Carry out an action, and show what it throws. Returns whether it succeeded.
 * @param {() => Promise<any>} action @param {string} [done] */
export async function attempt(action, done) {
  try {
    await action();
    if (done) toast(done);
    return true;
  } catch (error) {
    toast(/** @type {Error} */ (error).message, "bad");
    return false;
  }
}

export function Toasts() {
  return html`<div class="toasts" role="status" aria-live="polite">${toasts.value.map((each) => html`
    <div class=${"toast " + each.kind} key=${each.id}><span>${each.text}</span>
      ${each.action && html`<button class="plain" onClick=${() => { dismiss(each.id); each.action?.run(); }}>${each.action.title}</button>`}
      <button class="plain" aria-label=${text.close} onClick=${() => dismiss(each.id)}>✕</button>
    </div>`)}</div>`;
}
