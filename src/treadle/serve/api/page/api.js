// Talks to the server: sends the key, where one was given, and reads streams of events.

const KEY = "treadle.key";
const dialog = document.getElementById("key-dialog");
let asking = null; // the promise of the dialog that is open

// An answer of the server that is an error, or no answer at all; its message is one sentence.
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Return the server's answer to `path`. Where it wants a key, the user is asked for one; raises ServerError.
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${bytes(key)}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.", 0);
    }
    if (response.ok) return response;
    if (response.status !== 401) throw new ServerError(await reason(response), response.status);
    // Another request may have been given a new key meanwhile.
    if (sessionStorage.getItem(KEY) === key && !(await askForKey(key !== null))) {
      throw new ServerError("This server wants an API key.", 401);
    }
  }
}

// Yield the JSON of each event of a stream until it is done. Raises ServerError for an error in it, or its absence.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) throw new ServerError("The answer was cut off: the connection to the server is lost.", 0);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue; // a sign of life
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(sentence(event.error.message), 500);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Ask for a key and return whether one was given. Two requests that are refused at once ask once.
export function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const field = document.getElementById("key");
    document.getElementById("key-text").textContent = refused
      ? "The server did not accept that key."
      : "It is kept in this tab only, until the tab is closed.";
    dialog.returnValue = "";
    dialog.onclose = () => {
      const key = field.value.trim();
      const given = dialog.returnValue === "given" && key !== "";
      if (given) sessionStorage.setItem(KEY, key);
      field.value = "";
      asking = null;
      resolve(given);
      if (given) document.dispatchEvent(new Event("key"));
    };
    dialog.showModal();
    field.focus();
  });
  return asking;
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  dialog.close("given");
});
document.getElementById("key-cancel").addEventListener("click", () => dialog.close(""));

async function reason(response) {
  try {
    const body = await response.json();
    return sentence(body.error?.message ?? body.reason);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// Return a message with a capital and a full stop.
function sentence(message) {
  const text = String(message ?? "").trim() || "The server gave no reason.";
  const begun = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

// Headers hold bytes: return a text's UTF-8 as a string of one character a byte.
function bytes(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}
