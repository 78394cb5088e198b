// The conversation: what was said, how it is asked of the server, how the answer is shown while it comes.

import { events, request, ServerError } from "./api.js";
import { copyButton, Rendered } from "./markdown.js";
import { onState, pollForEver } from "./state.js";

const KEPT = "treadle.conversation";
const byId = (id) => document.getElementById(id);
const field = { message: byId("message"), system: byId("system"), temperature: byId("temperature"), most: byId("max-tokens") };

let server = null; // what it last said of itself
let turns = []; // {role, text, thoughts, note, error, view}
let running = null; // the AbortController of the answer that is being made

// --- asking

async function send(text) {
  add({ role: "user", text });
  await answer();
}

async function answer() {
  const turn = add({ role: "assistant", text: "", thoughts: "", note: "", error: "" });
  running = new AbortController();
  buttons();
  const clock = { begun: performance.now(), first: 0, last: 0, tokens: 0 };
  try {
    const response = await request(server.chats ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body()),
      signal: running.signal,
    });
    for await (const event of events(response)) take(turn, event, clock);
    turn.note = [turn.reason === "length" ? "stopped at the token limit" : "", speed(clock)].filter(Boolean).join(", ");
  } catch (error) {
    if (error.name === "AbortError") turn.note = "stopped";
    else if (error instanceof ServerError) turn.error = error.message;
    else {
      turn.error = "The answer could not be read.";
      console.error(error);
    }
  } finally {
    running = null;
    cancelAnimationFrame(frame);
    draw(turn);
    buttons();
    keep();
  }
}

function body() {
  const said = turns.slice(0, -1); // without the answer that is to come
  const common = {
    model: byId("model").value,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(field.temperature.value),
    ...(field.most.value ? { max_tokens: Number(field.most.value) } : {}),
  };
  if (!server.chats) return { ...common, prompt: said.map((turn) => turn.text).join("") };
  const system = server.takes_system ? field.system.value.trim() : "";
  return { ...common, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages(said)] };
}

// Return the turns as messages; what was asked without getting an answer goes together with what was asked next.
function messages(said) {
  const list = [];
  for (const { role, text } of said) {
    if (role === "assistant" && !text) continue;
    if (list.at(-1)?.role === role) list.at(-1).content += `\n\n${text}`;
    else list.push({ role, content: text });
  }
  return list;
}

function take(turn, event, clock) {
  if (event.usage) clock.tokens = event.usage.completion_tokens;
  const choice = event.choices[0];
  if (!choice) return;
  const text = server.chats ? (choice.delta.content ?? "") : choice.text;
  const thoughts = choice.delta?.reasoning_content ?? "";
  if (text || thoughts) {
    clock.last = performance.now();
    clock.first ||= clock.last;
  }
  turn.text += text;
  turn.thoughts += thoughts;
  turn.reason = choice.finish_reason ?? turn.reason;
  drawSoon(turn);
}

function speed({ begun, first, last, tokens }) {
  if (!first) return "the answer is empty";
  const words = [tokens === 1 ? "1 token" : `${tokens} tokens`];
  if (tokens > 1 && last > first) words.push(`${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} per second`);
  return [...words, `first after ${((first - begun) / 1000).toFixed(2)} s`].join(", ");
}

// --- showing

function add(turn) {
  const item = document.createElement("li");
  item.className = turn.role;
  const text = document.createElement("div");
  text.className = "text";
  item.append(Object.assign(document.createElement("h3"), { className: "hidden", textContent: turn.role === "user" ? "You" : "Model" }));
  item.append(text);
  turn.view = { item, text };
  turns.push(turn);
  byId("welcome").hidden = true;
  byId("conversation").append(item);
  following = true;
  draw(turn);
  return turn;
}

let frame = 0; // the next one, where it draws something

function drawSoon(turn) {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => draw(turn));
}

function draw(turn) {
  const { item, text } = turn.view;
  if (turn.role === "user" || !server?.chats) {
    text.textContent = turn.text;
    text.classList.add("plain");
  } else {
    turn.view.rendered ??= new Rendered(text);
    turn.view.rendered.update(turn.text);
  }
  if (turn.thoughts) drawThoughts(turn);
  const going = running !== null && turn === turns.at(-1);
  item.classList.toggle("going", going);
  item.setAttribute("aria-busy", String(going));
  item.querySelector("footer")?.remove();
  if (turn.role === "assistant" && !going) item.append(footer(turn));
  if (following) scrollDown();
}

function drawThoughts(turn) {
  const { view } = turn;
  if (!view.thoughts) {
    const details = document.createElement("details");
    details.className = "thoughts";
    details.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }));
    view.thoughts = details.appendChild(Object.assign(document.createElement("div"), { className: "plain" }));
    view.item.insertBefore(details, view.text);
  }
  view.thoughts.textContent = turn.thoughts.trim();
}

function footer(turn) {
  const line = document.createElement("footer");
  if (turn.error) line.append(Object.assign(document.createElement("p"), { className: "error", textContent: turn.error }));
  if (turn.note) line.append(Object.assign(document.createElement("span"), { textContent: turn.note }));
  if (turn.text && navigator.clipboard) line.append(copyButton(() => turn.text));
  if (turn === turns.at(-1)) {
    const again = Object.assign(document.createElement("button"), { type: "button", className: "quiet again", textContent: "Try again" });
    again.addEventListener("click", () => {
      if (running || !server) return;
      turns.pop();
      turn.view.item.remove();
      answer();
    });
    line.append(again);
  }
  return line;
}

// The view follows what comes, unless the user has scrolled up.
const view = byId("scroll");
let following = true;

function scrollDown() {
  view.scrollTop = view.scrollHeight;
}

view.addEventListener("scroll", () => (following = view.scrollHeight - view.scrollTop - view.clientHeight < 60));
new ResizeObserver(() => following && scrollDown()).observe(view);

function buttons() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("send").disabled = !server || !server.takes_text || !field.message.value.trim();
  document.querySelectorAll("button.again").forEach((button) => {
    if (button.closest("li") !== turns.at(-1)?.view.item) button.remove();
  });
}

// --- what the user does

function submit() {
  if (running || byId("send").disabled) return;
  if (!byId("composer").checkValidity()) {
    byId("settings").open = true; // or what is wrong could not be shown
    byId("composer").reportValidity();
    return;
  }
  const text = field.message.value;
  field.message.value = "";
  fit();
  send(server.chats ? text.trim() : text);
}

// Make the field as high as its text, within what the style allows.
function fit() {
  field.message.style.height = "auto";
  field.message.style.height = `${field.message.scrollHeight + 2}px`;
  buttons();
}

function startNew() {
  running?.abort();
  turns = [];
  byId("conversation").replaceChildren();
  byId("welcome").hidden = false;
  sessionStorage.removeItem(KEPT);
  field.message.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
field.message.addEventListener("input", fit);
field.message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !byId("key-dialog").open) running.abort();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  field.message.focus();
});
byId("new-chat").addEventListener("click", startNew);
byId("show-state").addEventListener("click", (event) => {
  const shown = document.body.classList.toggle("state-shown");
  event.currentTarget.setAttribute("aria-expanded", String(shown));
});

// --- the server, and what is kept when the page is loaded again

onState((state) => {
  const before = server;
  if (state) server = state;
  if (state && (!before || before.names.join("\n") !== state.names.join("\n"))) showModel(state);
  if (!before && state) restore();
  buttons();
});

function showModel(state) {
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...state.names.map((name) => new Option(name, name, false, name === chosen)));
  select.disabled = state.names.length < 2;
  document.title = `${state.names[0]} \u2013 Treadle`;
  byId("system-field").hidden = !state.takes_system || !state.chats;
  if (state.chats) return;
  field.message.placeholder = "Text to continue";
  byId("welcome").querySelector("h2").textContent = state.takes_text ? "Begin a text" : "This model has no tokenizer";
  byId("welcome-text").textContent = state.takes_text
    ? "This model has no chat template: it goes on with the text that you give it."
    : "It takes token ids only: ask it over the API.";
  field.message.disabled = !state.takes_text;
  if (!field.most.value) field.most.value = Math.min(128, Math.floor(state.max_model_len / 2)); // its texts rarely end
}

function keep() {
  const said = turns.map(({ role, text, thoughts, note, error, reason }) => ({ role, text, thoughts, note, error, reason }));
  const settings = [field.system.value, field.temperature.value, field.most.value];
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ said, settings }));
  } catch {
    sessionStorage.removeItem(KEPT); // too long to be kept
  }
}

function restore() {
  try {
    const { said, settings } = JSON.parse(sessionStorage.getItem(KEPT));
    [field.system.value, field.temperature.value, field.most.value] = settings;
    said.forEach(add);
    turns.forEach(draw);
    buttons();
  } catch {
    // nothing was kept
  }
}

for (const one of [field.system, field.temperature, field.most]) one.addEventListener("change", keep);
pollForEver();
