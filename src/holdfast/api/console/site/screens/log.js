/** The log as a table one can travel in: a histogram to choose the time, filters that the broker
 * applies, and a drawer with all about one record. */
import { bytes, count, duration, utc } from "../format.js";
import { html } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Choice, Command, Facts, Field, Head, State, Tabs, Time } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Drawer } from "../parts/drawer.js";
import { Payload, Preview, formsOf } from "../parts/payload.js";
import { Raw } from "../parts/raw.js";
import { SpanChoice, setSpan, spanOf } from "../parts/span.js";
import { Table } from "../parts/table.js";
import { change, link, route } from "../router.js";
import { text } from "../text.js";

const own = text.log;
export const path = "log";
export const title = own.title;
export const scope = "reader";

const KINDS = /** @type {[string, string][]} */ ([["message", own.messages], ["all", own.allKinds],
  ...["retained", "session", "cursor", "release", "will", "control", "producer"].map((each) => [each, each])]);
const LIVE_S = 3;

/** @param {any} row */
const placeOf = (row) => `${row.partition}/${row.offset}`;

const columns = [
  { key: "time", title: own.time, cell: (/** @type {any} */ row) => html`<${Time} us=${row.at_us} fine />` },
  { key: "place", title: own.place, minor: true, class: "mono", cell: placeOf },
  { key: "topic", title: own.topic, cell: (/** @type {any} */ row) => row.topic ? html`<${Raw} value=${row.topic} max=${70} />` : html`<${Badge}>${row.kind}<//>` },
  { key: "qos", title: own.qos, minor: true, cell: (/** @type {any} */ row) => row.topic && html`${row.qos}${row.retain ? html` <${Badge} kind="info">${own.retained}<//>` : ""}` },
  { key: "client", title: own.publisher, minor: true, cell: (/** @type {any} */ row) => html`<${Raw} value=${row.client} max=${30} empty="–" />` },
  { key: "size", title: own.size, align: /** @type {"right"} */ ("right"), minor: true, cell: (/** @type {any} */ row) => bytes(row.content.bytes) },
  { key: "payload", title: own.payload, class: "payload", cell: (/** @type {any} */ row) => row.cursor ? html`<${Raw} value=${row.cursor} max=${110} />` : html`<${Preview} content=${row.content} />` },
];

export function component() {
  const { filter, client, part, partition, kind = "message", at, after, live } = route.value.params;
  const { fromUs, toUs, isMoving } = spanOf("all");
  const isLive = live === "on" && isMoving && !after;
  // A moving span is cut to seconds, so that its requests are the same for a while.
  const from_us = isMoving ? Math.floor(fromUs / 1e7) * 1e7 : fromUs;
  const page = useLoad("log/records", { filter, client, text: part, partition, kind: kind === "all" ? null : kind, after, limit: 50, from_us, to_us: toUs || null }, { every: isLive ? LIVE_S : 0 });
  const set = (/** @type {string} */ name) => (/** @type {string} */ value) => change({ [name]: value, after: null });
  const rows = page.data?.records || [];
  return html`<${Head} title=${title} note=${own.note}>
      ${partition && html`<button onClick=${() => change({ partition: null, after: null })}>${own.onlyPartition(partition)}</button>`}
      <${SpanChoice} usual="all" />
      <button aria-pressed=${isLive} class=${isLive ? "primary" : ""} onClick=${() => change({ live: isLive ? null : "on", after: null, to: null })}>${isLive ? own.pause : own.follow}</button><//>
    <div class="row"><${Field} label=${own.filter} value=${filter || ""} onValue=${set("filter")} search class="wide mono" />
      <${Field} label=${own.publisherFilter} value=${client || ""} onValue=${set("client")} class="wide" />
      <${Field} label=${own.part} value=${part || ""} onValue=${set("part")} class="wide" />
      <${Choice} label=${own.kind} value=${kind} options=${KINDS} onValue=${(/** @type {string} */ value) => set("kind")(value === "message" ? "" : value)} /></div>
    <${Slider} filter=${filter} from_us=${from_us} toUs=${toUs} every=${isLive ? LIVE_S : 0} />
    <${State} of=${page} />
    <div class="split"><div><${Table} label=${title} columns=${columns} rows=${rows} rowKey=${placeOf} onRow=${(/** @type {any} */ row) => change({ at: placeOf(row) })}
        isChosen=${(/** @type {any} */ row) => placeOf(row) === at} empty=${page.loading ? text.loading : own.none}
        note=${page.data && own.scanned(count(page.data.scanned), rows.length)} less=${after ? () => change({ after: null }) : null}
        more=${page.data?.next ? () => change({ after: page.data.next }) : null} /></div>
      ${at && html`<${Detail} key=${at} place=${at} />`}</div>`;
}

/** The slider of time: messages per bucket. A dragged span becomes the span of the page.
 * @param {{filter?: string, from_us: number, toUs: number, every: number}} props */
function Slider({ filter, from_us, toUs, every }) {
  const found = useLoad("log/counts", { filter, from_us, to_us: toUs || null, buckets: 100 }, { every });
  const { data } = found;
  if (!data) return html`<${State} of=${found} />`;
  const width = data.bucket_us;
  const end = data.from_us + width * data.counts.length;
  const span = end - data.from_us;
  const shift = (/** @type {number} */ by) => setSpan(Math.max(0, data.from_us + by * span), Math.min(end + by * span, Date.now() * 1000));
  const total = data.counts.reduce((/** @type {number} */ sum, /** @type {number} */ each) => sum + each, 0);
  return html`<section class="card slider"><${Chart} label=${own.slider} height=${96} from=${data.from_us / 1e6} to=${end / 1e6}
      x=${data.counts.map((/** @type {any} */ _, /** @type {number} */ index) => (data.from_us + index * width) / 1e6)}
      series=${[{ label: own.messages, values: data.counts, bars: true }]} onSpan=${(/** @type {number} */ from, /** @type {number} */ to) => setSpan(from * 1e6, to * 1e6)} />
    <div class="row"><span class="note">${own.counted(count(total), duration(width / 1e6))}${data.complete_from_us > data.from_us && ` ${own.incomplete(utc(data.complete_from_us))}`}</span>
      <button onClick=${() => shift(-0.5)}>${own.earlier}</button><button onClick=${() => shift(0.5)}>${own.later}</button>
      <button onClick=${() => setSpan(Math.max(data.oldest_us, data.from_us - span), end + span > Date.now() * 1000 ? 0 : end + span)}>${own.zoomOut}</button></div></section>`;
}

/** All about one record. @param {{place: string}} props */
function Detail({ place }) {
  const [partition, offset] = place.split("/");
  const found = useLoad("log/record", { partition, offset, bytes: route.value.params.bytes });
  const { data } = found;
  const record = data?.record;
  const forms = record ? formsOf(data) : [];
  const wanted = route.value.params.form;
  const form = forms.some(([key]) => key === wanted) ? wanted : forms[0]?.[0];
  return html`<${Drawer} title=${own.record(place)} onClose=${() => change({ at: null, form: null, bytes: null })}><${State} of=${found} />
    ${record && html`<${Facts} rows=${[
        [own.time, html`<${Time} us=${record.at_us} fine />`], [own.kind, record.kind],
        [own.topic, record.topic && html`<a href=${link("log", { filter: record.topic })}><${Raw} value=${record.topic} max=${120} /></a>`],
        [own.publisher, record.client && html`<a href=${link("sessions", { client: record.client })}><${Raw} value=${record.client} max=${60} /></a>`],
        [own.qos, record.topic && `${record.qos}${record.retain ? ` · ${own.retained}` : ""}`],
        [own.producer, record.producer && html`<${Raw} value=${`${record.producer} #${record.sequence}`} />`],
        ...properties(record.content)]} />
      ${record.topic && html`<${Tabs} tabs=${forms} value=${form} onValue=${(/** @type {string} */ value) => change({ form: value }, true)} />
        ${data.problem && html`<p class="notice warn">${data.problem}</p>`}
        <${Payload} detail=${data} form=${form} />
        ${record.content.is_cut && record.content.bytes > 16384 && !route.value.params.bytes && html`<button onClick=${() => change({ bytes: 1048576 }, true)}>${own.showMore}</button>`}
        <p class="note">${data.previous ? html`${own.previous} <a href=${link("log", { ...route.value.params, at: placeOf(data.previous), form: null })}>${placeOf(data.previous)}</a>, <${Time} us=${data.previous.at_us} fine />` : data.is_first ? own.first : own.previousUnknown}</p>`}
      ${record.cursor && html`<pre tabindex="0"><${Raw} value=${record.cursor} max=${2000} /></pre>`}
      ${record.topic && html`<details><summary>${own.asCommand}</summary>${commands(record).map(([name, command]) => html`<${Command} title=${name} command=${command} />`)}</details>`}`}<//>`;
}

/** @param {import("../parts/payload.js").Content} content @returns {[string, any][]} */
function properties(content) {
  return [[own.contentType, content.content_type && html`<${Raw} value=${content.content_type} />`],
    [own.responseTopic, content.response_topic && html`<${Raw} value=${content.response_topic} />`],
    [own.correlation, content.correlation_base64 && html`<${Raw} value=${content.correlation_base64} />`],
    [own.expiry, content.expiry_s != null && duration(content.expiry_s)],
    ...(content.user_properties || []).map(([name, value]) => /** @type {[string, any]} */ ([html`<${Raw} value=${name} max=${40} />`, html`<${Raw} value=${value} />`]))];
}

/** A word for a shell. @param {string} word */
const quoted = (word) => `'${word.replaceAll("'", `'\\''`)}'`;
/** A Python string. @param {string} word */
const python = (word) => JSON.stringify(word);

/** The same record by other ways. @param {any} record @returns {[string, string][]} */
function commands(record) {
  const { partition, offset, topic } = record;
  return [
    [own.byLog, `holdfast log dump DIR --partition ${partition} --from ${offset} --to ${offset + 1} --full`],
    [own.byCurl, `curl -H "Authorization: Bearer $HOLDFAST_TOKEN" '${location.origin}/api/v1/log/record?partition=${partition}&offset=${offset}'`],
    [own.bySub, `mosquitto_sub -t ${quoted(topic)} -q 1 -D subscribe user-property stream-offset offsets:${partition}:${offset} -C 1`],
    [own.bySpark, `spark.read.format("holdfast").option("servers", ${python(location.host)})\n  .option("topics", ${python(topic)})\n  .option("startingOffsets", '{"${partition}": ${offset}}').load()`],
  ];
}
