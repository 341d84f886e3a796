/** Every setting of the node, with its origin. */
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Field, Head, State } from "../parts/basics.js";
import { Raw } from "../parts/raw.js";
import { Table } from "../parts/table.js";
import { change, route } from "../router.js";
import { text } from "../text.js";

const own = text.settings;
export const path = "settings";
export const title = own.title;
export const scope = "viewer";
export const group = text.groups.admin;

export function component() {
  const { search = "", all = "" } = route.value.params;
  const found = useLoad("settings");
  const rows = (found.data?.settings || []).filter((/** @type {any} */ row) => (all || !row.is_default || search) && `${row.key} ${JSON.stringify(row.value)} ${row.origin}`.toLowerCase().includes(search.toLowerCase()));
  return html`<${Head} title=${title} note=${found.data && own.note(found.data.node)}>
      <label class="check"><input type="checkbox" checked=${!!all} onChange=${() => change({ all: all ? null : 1 })} />${own.all}</label>
      <${Field} search label=${own.search} value=${search} onValue=${(/** @type {string} */ value) => change({ search: value })} /><//><${State} of=${found} />
    <${Table} label=${title} rows=${rows} rowKey=${(/** @type {any} */ row) => row.key} empty=${own.none} columns=${[
      { key: "k", title: own.key, cell: (/** @type {any} */ row) => html`<code>${row.key}</code>` },
      { key: "v", title: own.value, cell: (/** @type {any} */ row) => html`<${Raw} value=${typeof row.value === "string" ? row.value : JSON.stringify(row.value)} />` },
      { key: "o", title: own.origin, cell: (/** @type {any} */ row) => row.is_default ? html`<${Badge}>${own.standard}<//>` : html`<${Raw} value=${row.origin} />` }]} />`;
}
