/** The changes over the admin port: who, from where, what, before and after. */
import { get } from "../api.js";
import { html, useState } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Facts, Head, State, Time } from "../parts/basics.js";
import { Drawer } from "../parts/drawer.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { text } from "../text.js";
import { attempt } from "../toasts.js";

const own = text.audit;
export const path = "audit";
export const title = own.title;
export const scope = "admin";
export const group = text.groups.admin;

/** @param {any} row */
const what = (row) => row.action || `${row.method} ${row.path}`;

export function component() {
  const [open, setOpen] = useState(/** @type {any} */ (null));
  const [older, setOlder] = useState(/** @type {any[]} */ ([]));
  const first = useLoad("audit", { limit: 50 }, older.length ? {} : { every: 5 });
  const last = older.at(-1) || first.data;
  const rows = [...(first.data?.entries || []), ...older.flatMap((page) => page.entries)];
  const more = () => attempt(async () => setOlder([...older, await get("audit", { limit: 50, before: last.next })]));
  const json = (/** @type {string} */ name, /** @type {any} */ given) => given != null && html`<h2>${name}</h2><pre tabindex="0"><${Raw} value=${JSON.stringify(given, null, 2)} lines max=${4000} /></pre>`;
  return html`<${Head} title=${title} note=${own.note} /><${State} of=${first} /><div class="split"><div>
    <${Table} label=${title} rows=${rows} rowKey=${(/** @type {any} */ row) => row.node + row.time_us} empty=${own.none} onRow=${setOpen} isChosen=${(/** @type {any} */ row) => row === open}
      more=${last?.next ? more : null} columns=${[
      { key: "t", title: own.time, cell: (/** @type {any} */ row) => html`<${Time} us=${row.time_us} />` },
      { key: "w", title: own.who, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.who} />` },
      { key: "a", title: own.action, cell: (/** @type {any} */ row) => html`${what(row)}${row.parameters && html`<br /><${Raw} value=${row.parameters} />`}` },
      { key: "r", title: own.result, cell: (/** @type {any} */ row) => row.status >= 400 ? html`<${Badge} kind="bad">${row.status}<//>` : html`<${Badge} kind=${row.dry ? "" : "good"}>${row.dry ? own.tried : own.done}<//>` },
      { key: "n", title: own.node, minor: true, cell: (/** @type {any} */ row) => row.node }]} /></div>
    ${open && html`<${Drawer} key=${open.time_us} title=${`${what(open)} ${open.parameters || ""}`} onClose=${() => setOpen(null)}><${Facts} rows=${[[own.time, html`<${Time} us=${open.time_us} fine />`], [own.who, html`<${Raw} value=${open.who} />`], [own.from, open.remote], [own.request, html`<${Raw} value=${`${open.method} ${open.path}`} />`], [own.node, open.node], [own.refusal, open.error && html`<${Raw} value=${open.error} max=${400} />`]]} />
      ${json(own.before, open.before)}${json(own.after, open.after)}<//>`}</div>`;
}
