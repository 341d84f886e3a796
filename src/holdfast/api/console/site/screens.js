/** The screens, in the order of the navigation. A screen is one module in `screens/`, one line here,
 * and its part of `text.js`. */
import * as access from "./screens/access.js";
import * as audit from "./screens/audit.js";
import * as bans from "./screens/bans.js";
import * as client from "./screens/client.js";
import * as cluster from "./screens/cluster.js";
import * as drops from "./screens/drops.js";
import * as federation from "./screens/federation.js";
import * as log from "./screens/log.js";
import * as overview from "./screens/overview.js";
import * as pipeline from "./screens/pipeline.js";
import * as sessions from "./screens/sessions.js";
import * as settings from "./screens/settings.js";
import * as timeline from "./screens/timeline.js";
import * as topics from "./screens/topics.js";
import * as trace from "./screens/trace.js";

/** @typedef {{path: string, title: string, scope: string, component: () => any, group?: string}} Screen
 * `scope`: the role that the screen needs; a screen without `group` is at the top of the navigation */
/** @type {Screen[]} */
export const screens = [
  overview,
  log,
  topics,
  sessions,
  trace,
  cluster,
  timeline,
  federation,
  pipeline,
  drops,
  client,
  access,
  bans,
  settings,
  audit,
];
