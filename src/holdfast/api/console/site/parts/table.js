/** Tables. On a narrow screen, columns that are `minor` are hidden. */
import { html } from "../lib.js";
import { text } from "../text.js";

/** @template T @typedef {{key: string, title: any, cell: (row: T) => any, align?: "right", minor?: boolean,
 *   sort?: boolean, class?: string}} Column `sort`: its title orders the table by its key */
/** @template T @typedef {{columns: Column<T>[], rows: T[], rowKey: (row: T) => string | number, label: string, empty?: any,
 *   onRow?: (row: T) => void, isChosen?: (row: T) => boolean, order?: {by: string, down: boolean, onOrder: (by: string, down: boolean) => void},
 *   more?: (() => void) | null, less?: (() => void) | null, note?: any}} TableProps */

/** A table with rows that can be opened by mouse and keyboard.
 * @template T @param {TableProps<T>} props */
export function Table({ columns, rows, rowKey, label, empty = text.nothing, onRow, isChosen, order, more, less, note }) {
  const head = (/** @type {Column<T>} */ column) => {
    const name = classOf(column);
    if (!order || !column.sort) return html`<th class=${name} scope="col">${column.title}</th>`;
    const isBy = order.by === column.key;
    return html`<th class=${name} scope="col" aria-sort=${isBy ? (order.down ? "descending" : "ascending") : "none"}>
      <button class="plain" onClick=${() => order.onOrder(column.key, isBy ? !order.down : column.align === "right")}
        >${column.title}${isBy && html`<span aria-hidden="true">${order.down ? " ↓" : " ↑"}</span>`}</button></th>`;
  };
  return html`<div class="table" role="region" aria-label=${label} tabindex="0"><table>
      <thead><tr>${columns.map(head)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${rowKey(row)} class=${isChosen?.(row) ? "chosen" : ""} tabindex=${onRow && "0"}
        onClick=${onRow && ((/** @type {MouseEvent} */ event) => isOwn(event) && onRow(row))}
        onKeyDown=${onRow && ((/** @type {KeyboardEvent} */ event) => onKey(event, () => onRow(row)))}
        >${columns.map((column) => html`<td class=${classOf(column)}>${column.cell(row)}</td>`)}</tr>`)}</tbody></table>
    ${!rows.length && html`<p class="empty">${empty}</p>`}</div>
  ${(more || less || note) && html`<div class="pager"><span class="note">${note}</span>
    ${less && html`<button onClick=${less}>${text.back}</button>`}${more && html`<button onClick=${more}>${text.more}</button>`}</div>`}`;
}

/** @param {Column<any>} column */
const classOf = (column) => [column.align, column.minor && "minor", column.class].filter(Boolean).join(" ");

/** Whether a click is meant for the row: not for a link in it, and not the end of a selection of text.
 * @param {MouseEvent} event */
const isOwn = (event) => !(/** @type {Element} */ (event.target).closest("a,button,input")) && !getSelection()?.toString();

/** @param {KeyboardEvent} event @param {() => void} open */
function onKey(event, open) {
  const row = /** @type {HTMLElement} */ (event.currentTarget);
  if (event.target !== row) return;
  const next = event.key === "ArrowDown" ? row.nextElementSibling : event.key === "ArrowUp" ? row.previousElementSibling : null;
  if (next) /** @type {HTMLElement} */ (next).focus();
  else if (event.key === "Enter" || event.key === " ") open();
  else return;
  event.preventDefault();
}
