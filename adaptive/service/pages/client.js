"use strict";
// Requests to the server, for the dashboard and the chat, with the API key if one was entered; this tab keeps it.

let key = sessionStorage.getItem("key");

class NeedsKey extends Error {}

function headers() {
  const found = {"Content-Type": "application/json"};
  if (key) found.Authorization = "Bearer " + key;
  return found;
}

// The response. Throws NeedsKey for a missing or wrong key, else an Error with the server's message.
async function ask(path, {method = "GET", body, signal, more = {}} = {}) {
  const answer = await fetch(path, {method, body: body && JSON.stringify(body), signal, headers: {...headers(), ...more}});
  if (answer.ok) return answer;
  const said = (await answer.json().catch(() => ({}))).error?.message || answer.statusText;
  if (answer.status === 401) throw new NeedsKey(key ? said : "");
  throw Object.assign(new Error(said), {status: answer.status});
}

const call = async (path, options) => (await ask(path, options)).json();

// The server-sent events of a response, each as [name, data]. heard() is called for everything that comes, pings too.
async function* eventsOf(answer, heard = () => {}) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    heard();
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const one of whole) {
      let name = "message";
      const data = [];
      for (const line of one.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) yield [name, data.join("\n")];
    }
  }
}

let told = 0;  // when tell() was last called with a text, in milliseconds

// Show a text as the problem, "" for none. It is written only if it differs, since a screen reader reads it each time.
function tell(text) {
  const place = document.getElementById("problem");
  if (place.textContent !== text) place.textContent = text;
  if (text) told = Date.now();
}

// Run an action of the page, and show the error if it fails.
async function act(what) {
  tell("");
  try { await what(); } catch (error) { fail(error); }
}

// Show an error, and for NeedsKey the form that asks for the key.
function fail(error) {
  tell(error.message);
  const form = document.getElementById("key");
  if (error instanceof NeedsKey && form.hidden) {
    form.hidden = false;
    form.querySelector("input").focus();
  }
}

// Name a button for screen readers by its text and what it is about, since others on the page have the same text.
function named(button, about = button.dataset.about) {
  button.dataset.about = about;
  button.setAttribute("aria-label", `${button.textContent}: ${about.slice(0, 100)}`);
  return button;
}

function withKey(goOn) {
  const form = document.getElementById("key");
  form.onsubmit = event => {
    event.preventDefault();
    key = form.querySelector("input").value;
    sessionStorage.setItem("key", key);
    goOn();
  };
}

function welcome() {
  tell("");
  document.getElementById("key").hidden = true;
}
