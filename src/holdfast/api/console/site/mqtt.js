/** A small MQTT 5 client over WebSocket, for people who try a topic. It has no session and no
 * reconnect: what it receives is shown, and then forgotten. */
const PACKET_MAX = 1 << 20, RECEIVE_MAX = 100, KEEP_ALIVE_S = 30;
const encoder = new TextEncoder(), decoder = new TextDecoder();

/** @typedef {{topic: string, payload: Uint8Array, qos: number, retain: boolean, at: number}} Message */

/** A number of two bytes. @param {number} value */
const two = (value) => [value >> 8, value & 255];
/** A text with its length. @param {string} value */
const word = (value) => { const bytes = encoder.encode(value); return [...two(bytes.length), ...bytes]; };
/** A length of one to four bytes. @param {number} value @returns {number[]} */
const length = (value) => value < 128 ? [value] : [(value & 127) | 128, ...length(value >> 7)];

export class MqttClient {
  /** @param {string} url @param {{id: string, user?: string, password?: string}} who
   * @param {{onMessage: (message: Message) => void, onClose: (reason: string) => void}} told */
  constructor(url, { id, user, password }, { onMessage, onClose }) {
    this.onMessage = onMessage;
    this.onClose = onClose;
    this.buffer = new Uint8Array();
    this.last = 0;
    this.reason = "";
    /** @type {Map<number, {resolve: (codes: number[]) => void, reject: (error: Error) => void}>} */
    this.waiting = new Map();
    this.socket = new WebSocket(url, "mqtt");
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = (event) => this.take(new Uint8Array(event.data));
    this.socket.onclose = () => this.ended();
    this.socket.onopen = () => this.send(0x10, [...word("MQTT"), 5, 2 | (user ? 0x80 : 0) | (password ? 0x40 : 0), ...two(KEEP_ALIVE_S),
      8, 0x27, 0, PACKET_MAX >> 16, ...two(PACKET_MAX & 65535), 0x21, ...two(RECEIVE_MAX), ...word(id), ...(user ? word(user) : []), ...(password ? word(password) : [])]);
    /** Resolved when the broker has accepted the client. @type {Promise<any>} */
    this.connected = this.answer(0);
    this.ping = setInterval(() => this.socket.readyState === 1 && this.send(0xc0, []), KEEP_ALIVE_S * 700);
  }

  /** @param {number} id @returns {Promise<number[]>} the reason codes */
  answer(id) {
    return new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
  }

  /** @param {number} head @param {number[]} body @param {Uint8Array} [payload] */
  send(head, body, payload = new Uint8Array()) {
    this.socket.send(new Uint8Array([head, ...length(body.length + payload.length), ...body, ...payload]));
  }

  /** @param {string} filter @param {number} qos */
  subscribe(filter, qos) {
    const id = this.next();
    this.send(0x82, [...two(id), 0, ...word(filter), qos]);
    return this.answer(id);
  }

  /** @param {string} filter */
  unsubscribe(filter) {
    const id = this.next();
    this.send(0xa2, [...two(id), 0, ...word(filter)]);
    return this.answer(id);
  }

  /** Publish, and wait for the acknowledgement. @param {string} topic @param {string} payload @param {number} qos @param {boolean} retain */
  publish(topic, payload, qos, retain) {
    const id = qos ? this.next() : 0;
    this.send(0x30 | (qos << 1) | (retain ? 1 : 0), [...word(topic), ...(qos ? two(id) : []), 0], encoder.encode(payload));
    return qos ? this.answer(id) : Promise.resolve([0]);
  }

  next() {
    do this.last = (this.last % 65535) + 1; while (this.waiting.has(this.last));
    return this.last;
  }

  close() {
    if (this.socket.readyState === 1) this.send(0xe0, []);
    this.socket.close();
  }

  ended() {
    clearInterval(this.ping);
    for (const each of this.waiting.values()) each.reject(new Error(this.reason || "closed"));
    this.waiting.clear();
    this.onClose(this.reason);
  }

  /** Take bytes: a packet may come in pieces, and several in one. @param {Uint8Array} data */
  take(data) {
    const all = new Uint8Array(this.buffer.length + data.length);
    all.set(this.buffer);
    all.set(data, this.buffer.length);
    let at = 0;
    for (;;) {
      const found = variable(all, at + 1);
      if (!found || all.length < found.end + found.value) break;
      this.packet(all[at], all.subarray(found.end, found.end + found.value));
      at = found.end + found.value;
    }
    this.buffer = all.slice(at);
  }

  /** @param {number} head @param {Uint8Array} body */
  packet(head, body) {
    const kind = head >> 4, id = (body[0] << 8) | body[1];
    if (kind === 2) this.resolve(0, [body[1]]);
    else if (kind === 3) this.receive(head, body);
    else if (kind === 5) body[2] >= 0x80 ? this.resolve(id, [body[2]]) : this.send(0x62, two(id));
    else if (kind === 6) this.send(0x70, two(id));
    else if (kind === 4 || kind === 7) this.resolve(id, [body[2] || 0]);
    else if (kind === 9 || kind === 11) {
      const { value, end } = variable(body, 2) || { value: 0, end: 3 };
      this.resolve(id, [...body.subarray(end + value)]);
    } else if (kind === 14) this.reason = `0x${(body[0] || 0).toString(16)}`;
  }

  /** @param {number} id @param {number[]} codes */
  resolve(id, codes) {
    const waiting = this.waiting.get(id);
    this.waiting.delete(id);
    const bad = codes.find((code) => code >= 0x80);
    if (bad === undefined) waiting?.resolve(codes);
    else {
      if (!id) this.reason = `0x${bad.toString(16)}`;
      waiting?.reject(new Error(`0x${bad.toString(16)}`));
    }
  }

  /** @param {number} head @param {Uint8Array} body */
  receive(head, body) {
    const qos = (head >> 1) & 3, end = 2 + ((body[0] << 8) | body[1]);
    const topic = decoder.decode(body.subarray(2, end));
    const after = end + (qos ? 2 : 0), properties = variable(body, after) || { value: 0, end: after + 1 };
    this.onMessage({ topic, payload: body.slice(properties.end + properties.value), qos, retain: (head & 1) > 0, at: Date.now() * 1000 });
    if (qos) this.send(qos === 1 ? 0x40 : 0x50, [...body.subarray(end, after)]);
  }
}

/** @param {Uint8Array} data @param {number} at @returns {{value: number, end: number} | null} null: it is not all there */
function variable(data, at) {
  let value = 0;
  for (let index = 0; index < 4; index++) {
    if (at + index >= data.length) return null;
    value += (data[at + index] & 127) << (7 * index);
    if (data[at + index] < 128) return { value, end: at + index + 1 };
  }
  return null;
}
