/** Bans by hand and lock-outs after failed logins: list, set, lift. */
import { may, post, remove } from "../api.js";
import { count } from "../format.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Choice, Field, Head, State, Time } from "../parts/basics.js";
import { ask } from "../parts/drawer.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { change, route } from "../router.js";
import { text } from "../text.js";
import { attempt } from "../toasts.js";

const own = text.bans;
export const path = "bans";
export const title = own.title;
export const scope = "viewer";
export const group = text.groups.admin;

/** @typedef {"client" | "user" | "address"} Scope */
const SCOPES = /** @type {[Scope, string][]} */ (["client", "user", "address"].map((each) => [each, own.scopes[/** @type {Scope} */ (each)]]));
const TIMES = /** @type {[string, string][]} */ ([["3600", own.hour], ["86400", own.day], ["604800", own.week], ["0", own.always]]);

/** Ban a client id, a user or an address. @param {Partial<Record<Scope, string>>} known the names to choose from; none: any @returns {Promise<void>} */
export async function ban(known = {}) {
  const choices = SCOPES.filter(([each]) => known[each]);
  const given = await ask({ title: own.add, action: own.set, danger: true, body: html`<p>${own.addNote}</p>`, fields: [
    { name: "scope", label: own.scope, options: choices.length ? choices.map(([each, name]) => /** @type {[string, string]} */ ([each, `${name}: ${known[each]}`])) : SCOPES },
    ...(choices.length ? [] : [{ name: "name", label: own.name }]),
    { name: "duration", label: own.duration, options: TIMES }, { name: "reason", label: own.reason }] });
  if (!given) return;
  const name = known[/** @type {Scope} */ (given.scope)] || given.name;
  await attempt(() => post("ban", {}, { [given.scope]: name, duration_s: Number(given.duration), reason: given.reason }), own.done);
}

/** @param {any} row */
async function lift(row) {
  if (await ask({ title: own.lift, action: own.lift, body: html`<${Raw} value=${row.name} /> ${own.liftNote}` })) await attempt(() => remove("ban", { [row.scope]: row.name }), own.lifted);
}

export function component() {
  const { search, kind = "", after } = route.value.params;
  const page = useLoad("bans", { search, kind, after, limit: 50 }, { every: 10 });
  const columns = [
    { key: "name", title: own.name, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.name} max=${60} />` },
    { key: "scope", title: own.scope, cell: (/** @type {any} */ row) => own.scopes[/** @type {Scope} */ (row.scope)] },
    { key: "kind", title: own.kind, cell: (/** @type {any} */ row) => html`<${Badge} kind=${row.kind === "ban" ? "bad" : "warn"}>${row.kind === "ban" ? own.ban : own.lockout}<//>` },
    { key: "until", title: own.until, cell: (/** @type {any} */ row) => (row.until_us ? html`<${Time} us=${row.until_us} />` : own.always) },
    { key: "reason", title: own.reason, minor: true, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.reason} max=${80} empty="–" />` },
    { key: "by", title: own.by, minor: true, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.by || row.node} max=${40} />` },
    ...(may("operator") ? [{ key: "lift", title: text.actions, align: /** @type {"right"} */ ("right"), cell: (/** @type {any} */ row) => html`<button onClick=${() => lift(row).then(page.reload)}>${own.lift}</button>` }] : []),
  ];
  return html`<${Head} title=${title} note=${own.note}>${may("operator") && html`<button onClick=${() => ban().then(page.reload)}>${own.add}…</button>`}<//>
    <div class="row"><${Field} label=${own.search} value=${search || ""} onValue=${(/** @type {string} */ value) => change({ search: value, after: null })} search class="wide" />
      <${Choice} label=${own.kind} value=${kind} options=${[["", own.all], ["ban", own.bansOnly], ["lockout", own.lockoutsOnly]]} onValue=${(/** @type {string} */ value) => change({ kind: value, after: null })} /></div>
    <${State} of=${page} /><${Table} label=${title} columns=${columns} rows=${page.data?.bans || []} rowKey=${(/** @type {any} */ row) => `${row.scope} ${row.kind} ${row.node} ${row.name}`} empty=${page.loading ? text.loading : own.none}
      note=${page.data && own.matched(count(page.data.matched))} less=${after ? () => change({ after: null }) : null} more=${page.data?.next ? () => change({ after: page.data.next }) : null} />`;
}
