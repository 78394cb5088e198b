// The live state of the server, asked for once a second.

import { askForKey, request } from "./api.js";

const EVERY = 1000; // milliseconds between two questions
const PATIENCE = 5000; // milliseconds for an answer
const KEPT = 60; // points of each curve
const WINDOW = 3; // points that a rate is taken over, so that it does not jump

const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// What one engine counts and what all of them count together is what each card draws from.
const CARDS = [
  { id: "speed", title: "Tokens per second", show: (now) => [rate(now.generated), `${rate(now.prompt)} of prompts`],
    lines: (now) => [now.generated] },
  { id: "sequences", title: "Sequences", show: (now) => [`${now.running} running`, `${now.waiting} waiting`],
    lines: (now) => [now.running, now.waiting] },
  { id: "cache", title: "KV cache in use", show: (now) => [percent(now.usage), `of ${number.format(now.room)} tokens`],
    lines: (now) => [now.usage], most: 1 },
  { id: "prefix", title: "Prefix hits", show: (now) => [percent(now.hits), `of ${brief.format(now.lookedUp)} prompt tokens`],
    lines: (now) => [now.hits ?? 0], most: 1 },
  { id: "step", title: "Tokens per step",
    show: (now) => [rate(now.perStep), now.perStep === null ? "no step now" : `${rate(now.seqsPerStep)} sequences, ${milliseconds(now.stepSeconds)}`],
    lines: (now) => [now.perStep ?? 0, now.seqsPerStep ?? 0] },
];

let history = [];
let samples = []; // {time, counts} of the last questions
const watchers = [];

// Call `watch` with each answer, or with null where there was none.
export function onState(watch) {
  watchers.push(watch);
}

export async function pollForEver() {
  for (;;) {
    if (!document.hidden) await ask();
    await new Promise((resolve) => setTimeout(resolve, EVERY));
  }
}

async function ask() {
  const patience = new AbortController();
  const timer = setTimeout(() => patience.abort(), PATIENCE);
  try {
    const state = await (await request("state", { signal: patience.signal })).json();
    show(state);
    watchers.forEach((watch) => watch(state, ""));
  } catch (error) {
    const why = error.name === "AbortError" ? "The server does not answer." : error.message;
    history = [];
    samples = [];
    status(error.status === 401 ? "locked" : "lost", why);
    watchers.forEach((watch) => watch(null, why));
    if (error.status === 401) await untilKey();
  } finally {
    clearTimeout(timer);
  }
}

// Wait until the user gives a key after all, here or for a message.
async function untilKey() {
  const button = byId("enter-key");
  button.hidden = false;
  button.onclick = () => askForKey(false);
  await new Promise((resolve) => document.addEventListener("key", resolve, { once: true }));
  button.hidden = true;
}

const WORDS = { ok: "ready", busy: "working", asleep: "asleep", failed: "not healthy", lost: "not reachable", locked: "locked" };

function status(kind, why = "") {
  const shown = byId("status");
  if (shown.dataset.status !== kind) {
    shown.dataset.status = kind;
    shown.textContent = WORDS[kind];
  }
  const notice = byId("notice");
  const trouble = ["asleep", "failed", "lost", "locked"].includes(kind);
  notice.hidden = !trouble;
  notice.dataset.status = kind;
  if (trouble && byId("notice-text").textContent !== why) byId("notice-text").textContent = why;
  byId("state").classList.toggle("stale", kind === "lost" || kind === "locked");
}

function show(state) {
  const now = measure(state);
  const why = { failed: "The engine makes no steps: ", asleep: "The engine is asleep: " }[state.status] ?? "";
  status(state.status === "ok" && now.running ? "busy" : state.status, why && `${why}${state.reason}.`);
  history.push(now);
  history = history.slice(-KEPT);
  for (const card of CARDS) draw(card, now);
  showEngines(state.engines);
  showFacts(state, now);
  entries("summary", Object.entries(state.summary));
}

// Return the numbers of now, rates since a few questions ago.
function measure(state) {
  const sum = (name) => state.engines.reduce((total, engine) => total + engine[name], 0);
  const names = ["generated_tokens", "prompt_tokens", "steps", "step_seconds", "stepped_tokens", "stepped_sequences"];
  const counts = Object.fromEntries(names.map((name) => [name, sum(name)]));
  const time = performance.now() / 1000;
  if (samples.length && counts.steps < samples.at(-1).counts.steps) {
    samples = []; // the server was started again
    history = [];
  }
  samples.push({ time, counts });
  samples = samples.slice(-1 - WINDOW);
  const first = samples[0];
  const grown = (name) => counts[name] - first.counts[name];
  const seconds = time - first.time;
  const steps = grown("steps");
  return {
    generated: seconds ? grown("generated_tokens") / seconds : 0,
    prompt: seconds ? grown("prompt_tokens") / seconds : 0,
    perStep: steps ? grown("stepped_tokens") / steps : null,
    seqsPerStep: steps ? grown("stepped_sequences") / steps : null,
    stepSeconds: steps ? grown("step_seconds") / steps : null,
    running: sum("running"),
    waiting: sum("waiting"),
    usage: sum("kv_usage") / state.engines.length,
    room: state.kv_cache.tokens * state.engines.length,
    lookedUp: sum("looked_up_tokens"),
    hits: sum("looked_up_tokens") ? sum("cached_tokens") / sum("looked_up_tokens") : null,
  };
}

function rate(value) {
  return value === null ? "\u2013" : value && value < 9.95 ? value.toFixed(1) : number.format(value);
}

function percent(share) {
  return share === null ? "\u2013" : `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`;
}

function milliseconds(seconds) {
  return `${(1000 * seconds).toPrecision(seconds < 0.001 ? 2 : 3).replace(/e.*/, "")} ms`;
}

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = KEPT - 1;
const HEIGHT = 32;

function draw(card, now) {
  const section = byId(`card-${card.id}`) ?? makeCard(card);
  const [value, more] = card.show(now);
  section.querySelector(".value").textContent = value;
  section.querySelector(".more").textContent = more;
  const points = history.map(card.lines);
  const most = card.most ?? Math.max(1e-9, ...points.flat()) * 1.1;
  section.querySelectorAll("path").forEach((path, place) => {
    const drawn = points.map((values, at) => {
      const x = WIDTH - (points.length - 1 - at);
      return `${x} ${(HEIGHT - 1 - (values[place] / most) * (HEIGHT - 2)).toFixed(2)}`;
    });
    path.setAttribute("d", `M${drawn.join("L")}`);
  });
}

function makeCard(card) {
  const section = document.createElement("section");
  section.id = `card-${card.id}`;
  section.className = "card";
  const title = document.createElement("h3");
  title.textContent = card.title;
  const numbers = document.createElement("p");
  const value = document.createElement("span");
  value.className = "value";
  const more = document.createElement("span");
  more.className = "more";
  numbers.append(value, " ", more);
  const curve = document.createElementNS(SVG, "svg");
  curve.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  curve.setAttribute("preserveAspectRatio", "none");
  curve.setAttribute("aria-hidden", "true");
  const zeros = { generated: 0, running: 0, waiting: 0, usage: 0, hits: 0, perStep: 0, seqsPerStep: 0 };
  for (const _ of card.lines(zeros)) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("vector-effect", "non-scaling-stroke");
    curve.append(path);
  }
  section.classList.toggle("two", curve.children.length > 1);
  section.append(title, numbers, curve);
  byId("cards").append(section);
  return section;
}

function showEngines(engines) {
  byId("engines").hidden = engines.length < 2;
  const rows = engines.map((engine, place) => {
    const row = document.createElement("tr");
    for (const text of [place, engine.running, engine.waiting, percent(engine.kv_usage)]) {
      row.append(Object.assign(document.createElement("td"), { textContent: text }));
    }
    return row;
  });
  byId("engines").tBodies[0].replaceChildren(...rows);
}

function showFacts(state, now) {
  const sum = (name) => state.engines.reduce((total, engine) => total + engine[name], 0);
  const finished = {};
  for (const engine of state.engines) {
    for (const [reason, count] of Object.entries(engine.finished)) finished[reason] = (finished[reason] ?? 0) + count;
  }
  const ends = Object.entries(finished).map(([reason, count]) => `${number.format(count)} ${reason}`);
  const limits = state.engines.map((engine) => `${number.format(engine.budget_tokens)} tokens, ${engine.budget_seqs} sequences`);
  const facts = [
    ["dtype", state.summary.dtype ?? ""],
    ["Weights", state.weight_version],
    ["Context", `${number.format(state.max_model_len)} tokens`],
    ["Ended", ends.join(", ")],
    ["Preemptions", number.format(sum("preemptions"))],
    ["Guesses that held", sum("drafted_tokens") ? percent(sum("accepted_tokens") / sum("drafted_tokens")) : ""],
    ["Last step allowed", sum("steps") ? limits.join("; ") : ""],
    ["Last decision", state.engines.map((engine) => engine.decision).filter(Boolean).join(" | ")],
    ["Running for", duration(state.uptime_seconds)],
  ];
  entries("facts", facts);
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Show names and texts in a list, those that have a text.
function entries(id, pairs) {
  const list = byId(id);
  const wanted = pairs.filter(([, text]) => text);
  const shown = wanted.map(([name, text]) => `${name}\n${text}`).join("\0");
  if (list.dataset.shown === shown) return; // a selection in it stays
  list.dataset.shown = shown;
  list.replaceChildren(
    ...wanted.flatMap(([name, text]) => [
      Object.assign(document.createElement("dt"), { textContent: name }),
      Object.assign(document.createElement("dd"), { textContent: text, className: text.length > 60 ? "long" : "" }),
    ]),
  );
}
