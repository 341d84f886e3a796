/** The question what a client may do, and the users and tokens of the admin port. */
import { may, post, put, remove } from "../api.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Card, Choice, Command, Field, Head, State, Time } from "../parts/basics.js";
import { ask } from "../parts/drawer.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { change, route } from "../router.js";
import { text } from "../text.js";
import { attempt } from "../toasts.js";

const own = text.access;
export const path = "access";
export const title = own.title;
export const scope = "viewer";
export const group = text.groups.admin;

const ROLES = /** @type {[string, string][]} */ (["viewer", "reader", "operator", "admin"].map((role) => [role, own.roles[/** @type {"admin"} */ (role)]]));
const DAYS = /** @type {[string, string][]} */ ([["90", own.days(90)], ["30", own.days(30)], ["1", own.days(1)], ["365", own.days(365)], ["0", own.forever]]);
const role = { name: "role", label: own.role, options: ROLES };
const at = (/** @type {number} */ seconds) => html`<${Time} us=${seconds * 1e6} />`;

/** @param {() => void} reload */
async function addUser(reload) {
  const given = await ask({ title: own.addUser, action: own.add, fields: [{ name: "name", label: own.name }, role, { name: "password", label: own.password, type: "password" }] });
  if (given && await attempt(() => post("users", {}, given), own.added(given.name))) reload();
}

/** @param {any} user @param {() => void} reload */
async function changeUser(user, reload) {
  const given = await ask({ title: own.change(user.name), action: own.save, fields: [{ ...role, value: user.role }, { name: "password", label: own.newPassword, type: "password" }] });
  if (given && await attempt(() => put(`users/${encodeURIComponent(user.name)}`, {}, given), own.changed(user.name))) reload();
}

/** @param {() => void} reload */
async function addToken(reload) {
  const given = await ask({ title: own.addToken, action: own.add, fields: [{ name: "note", label: own.purpose }, role, { name: "days", label: own.valid, options: DAYS }] });
  if (!given) return;
  await attempt(async () => {
    const made = await post("tokens", {}, { role: given.role, note: given.note, valid_s: Number(given.days) * 86400 });
    reload();
    await ask({ title: own.made, action: own.noted, body: html`<p>${own.once}</p><${Command} command=${made.token} />` });
  });
}

/** @param {string} kind @param {string} id @param {string} name @param {() => void} reload */
async function end(kind, id, name, reload) {
  if (await ask({ title: own.end(name), action: own.remove, danger: true, body: html`<p>${own.endNote}</p>` }) && await attempt(() => remove(`${kind}/${encodeURIComponent(id)}`), own.ended(name))) reload();
}

export function component() {
  return html`<${Head} title=${title} /><${Rights} />${may("admin") && html`<${Accounts} />`}`;
}

/** What a client may do, and by which rule. The question is in the URL. */
function Rights() {
  const { client, action = "publish", topic, user } = route.value.params;
  const found = useLoad(client && topic ? "may" : null, { client, action, topic, user });
  const { data } = found;
  const set = (/** @type {string} */ name) => (/** @type {string} */ value) => change({ [name]: value });
  const field = (/** @type {"client" | "topic" | "user"} */ name, /** @type {string | undefined} */ value) => html`<${Field} label=${own.asked[name]} value=${value || ""} onValue=${set(name)} class="wide" search=${name === "client"} />`;
  return html`<${Card} title=${own.may}><div class="row">${field("client", client)}<${Choice} label=${own.action} value=${action} options=${Object.entries(own.actions)} onValue=${set("action")} />${field("topic", topic)}${field("user", user)}</div>
    <${State} of=${found} />${data && html`<p class="sentence"><${Badge} kind=${{ allowed: "good", partly: "warn", denied: "bad" }[/** @type {"denied"} */ (data.verdict)]}>${own.verdicts[/** @type {"denied"} */ (data.verdict)]}<//> <${Raw} value=${data.sentence} max=${1000} /></p>
      ${data.notes.map((/** @type {string} */ each) => html`<p class="note"><${Raw} value=${each} max=${500} /></p>`)}
      ${data.rules.length > 0 && html`<${Table} label=${own.rules} rows=${data.rules} rowKey=${(/** @type {any} */ row) => row.source + row.line + row.text} columns=${[
        { key: "s", title: own.source, class: "mono", cell: (/** @type {any} */ row) => html`<${Raw} value=${row.source + (row.line ? `:${row.line}` : "")} max=${120} />` },
        { key: "r", title: own.rule, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.text} max=${300} />` },
        { key: "a", title: own.verdict, cell: (/** @type {any} */ row) => html`<${Badge} kind=${row.allows ? "good" : "bad"}>${own.verdicts[row.allows ? "allowed" : "denied"]}<//>` }]} />`}`}<//>`;
}

/** Users and tokens. */
function Accounts() {
  const users = useLoad("users"), tokens = useLoad("tokens");
  const buttons = (/** @type {any[]} */ ...those) => html`<div class="buttons">${those.map(([name, run, kind]) => html`<button class=${kind} onClick=${run}>${name}</button>`)}</div>`;
  return html`<p class="note">${own.note}</p>
    <${Card} title=${own.users} aside=${html`<button onClick=${() => addUser(users.reload)}>${own.addUser}…</button>`}><${State} of=${users} />
      <${Table} label=${own.users} rows=${users.data || []} rowKey=${(/** @type {any} */ row) => row.name} empty=${own.noUsers} columns=${[
        { key: "n", title: own.name, cell: (/** @type {any} */ row) => row.name }, { key: "r", title: own.role, cell: (/** @type {any} */ row) => html`<${Badge} kind="info">${row.role}<//>` },
        { key: "c", title: own.created, minor: true, cell: (/** @type {any} */ row) => at(row.created_s) }, { key: "u", title: own.used, minor: true, cell: (/** @type {any} */ row) => at(row.used_s) },
        { key: "b", title: text.actions, align: "right", cell: (/** @type {any} */ row) => buttons([own.edit, () => changeUser(row, users.reload)], [own.remove, () => end("users", row.name, row.name, users.reload), "danger"]) }]} /><//>
    <${Card} title=${own.tokens} aside=${html`<button onClick=${() => addToken(tokens.reload)}>${own.addToken}…</button>`}><${State} of=${tokens} />
      <${Table} label=${own.tokens} rows=${tokens.data || []} rowKey=${(/** @type {any} */ row) => row.id} empty=${own.noTokens} columns=${[
        { key: "n", title: own.purpose, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.note} empty=${row.id} />` }, { key: "r", title: own.role, cell: (/** @type {any} */ row) => html`<${Badge} kind="info">${row.role}<//>` },
        { key: "c", title: own.created, minor: true, cell: (/** @type {any} */ row) => html`${at(row.created_s)} ${row.created_by}` }, { key: "u", title: own.used, minor: true, cell: (/** @type {any} */ row) => at(row.used_s) },
        { key: "e", title: own.expires, cell: (/** @type {any} */ row) => row.expires_s ? at(row.expires_s) : own.forever },
        { key: "b", title: text.actions, align: "right", cell: (/** @type {any} */ row) => buttons([own.remove, () => end("tokens", row.id, row.note || row.id, tokens.reload), "danger"]) }]} /><//>`;
}
