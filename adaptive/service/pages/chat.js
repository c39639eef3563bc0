"use strict";
// A chat with the served model. Messages are only inserted as text of a node, never as markup.

const at = id => document.getElementById(id);
const field = at("ask").querySelector("textarea");

// The conversation, kept in this tab's session storage: [{role, content, thought, tokens: [[text, drafted]], note}].
let talk = JSON.parse(sessionStorage.getItem("talk") || "[]");
let session = sessionStorage.getItem("session") || newSession();
// The answer in progress: {stop: its AbortController, before: the conversation without it, asked: the question if `before`
// lacks it, said: its message, begun: a token has arrived, ended: its reason to end has arrived}.
let running = null;
// The conversation before "New chat", until a question is answered in the new one: [talk, session].
let left = JSON.parse(sessionStorage.getItem("left") || "null");
const items = new WeakMap();  // by message: its element
// Milliseconds before a retry while the models are loaded.
const AGAIN = 2000;

const rate = x => x.toFixed(x >= 9.95 ? 0 : x >= .995 ? 1 : 2);

function newSession() {
  return `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
}

// An answer in progress is stored as if it ended now, because the page may be closed or discarded.
function remember() {
  let kept = talk, typed = field.value;
  if (running?.begun) kept = [...talk.slice(0, -1), {...running.said, note: "interrupted"}];
  else if (running) [kept, typed] = [running.before, withTyped(running.asked)];
  try {
    sessionStorage.setItem("talk", JSON.stringify(kept));
    sessionStorage.setItem("typed", typed);
    sessionStorage.setItem("session", session);
    sessionStorage.setItem("left", JSON.stringify(left));
  } catch { /* the storage is full: the page goes on, and a reload shows the last state that was stored */ }
}

// A question that goes back into the input field, before what was typed meanwhile.
function withTyped(question) {
  return [question, field.value].filter(text => text.trim()).join("\n");
}

function made(name, text, kind) {
  const one = document.createElement(name);
  if (text) one.textContent = text;
  if (kind) one.className = kind;
  return one;
}

function button(text, press, about) {
  const one = named(made("button", text, "quiet"), about);
  one.onclick = press;
  return one;
}

// A node for the text of one chunk.
function tokenOf([text, drafted]) {
  if (!drafted) return document.createTextNode(text);
  const one = made("span", text, "token drafted");
  one.title = "drafted";
  return one;
}

// The element of a message, made at the first call.
function itemOf(message) {
  if (items.has(message)) return items.get(message);
  const item = made("li", null, message.role), text = made("div", null, "text");
  item.append(made("span", message.role === "user" ? "You" : "Answer", "soft"));
  if (message.thought) item.append(thoughtOf(message.thought));
  if (message.tokens) text.append(...message.tokens.map(tokenOf));
  else text.textContent = message.content;
  const foot = made("div", null, "row"), buttons = made("span");
  if (message.role === "user") buttons.append(button("Edit", () => edit(item, message), message.content));
  else {
    const asked = talk[talk.indexOf(message) - 1]?.content || "";
    const press = button("Copy", () => copy(message.content, text, press), asked);
    buttons.append(button("Regenerate", () => regenerate(message), asked), press);
  }
  foot.append(made("span", message.note, "soft note"), buttons);
  item.append(text, foot);
  items.set(message, item);
  return item;
}

function thoughtOf(text) {
  const box = made("details", null, "thought");
  box.append(made("summary", "Thoughts"), made("div", text, "text"));
  return box;
}

// Show the conversation. Elements that are there already stay, with their focus, selection and open boxes.
function show() {
  const wanted = new Set(talk.map(itemOf));
  for (const item of [...at("talk").children]) if (!wanted.has(item)) item.remove();
  for (const item of wanted) if (!item.isConnected) at("talk").append(item);
  for (const one of at("talk").querySelectorAll("button")) one.disabled = running !== null;
  at("hint").hidden = talk.length > 0;
  at("talk").setAttribute("aria-busy", String(running !== null));
  at("send").hidden = at("new").disabled = running !== null;
  at("back").hidden = left === null || talk.length > 0;
  at("stop").hidden = running === null;
}

// Without navigator.clipboard (plain http from another machine) only selected text can be copied.
async function copy(content, text, press) {
  tell("");
  let done = true;
  try { await navigator.clipboard.writeText(content); } catch {
    const box = made("textarea");
    box.value = content;
    box.style.position = "fixed";
    document.body.append(box);
    box.select();
    done = document.execCommand("copy");
    box.remove();
    press.focus();
  }
  if (!done) {
    getSelection().selectAllChildren(text);
    return tell("The browser does not let this page copy. The answer is now selected: copy it with the browser's menu.");
  }
  press.textContent = "Copied";
  named(press);
  setTimeout(() => { press.textContent = "Copy"; named(press); }, 2000);
}

// Replace a question by a field to edit it. Sending it drops all later messages.
function edit(item, message) {
  const box = made("textarea"), send = made("button", "Send again"), leave = made("button", "Cancel", "quiet");
  box.value = message.content;
  box.rows = Math.min(10, 1 + box.value.split("\n").length);
  box.dir = "auto";
  box.setAttribute("aria-label", "your message, changed");
  send.onclick = () => { if (box.value.trim()) say(box.value, message); };
  leave.onclick = () => {
    items.delete(message);
    item.replaceWith(itemOf(message));
    itemOf(message).querySelector("button").focus();
  };
  item.replaceChildren(box, send, leave);
  box.focus();
}

// Ask a question. `instead` is an earlier one that it replaces, with all messages after it.
function say(text, instead) {
  const before = talk;
  talk = [...talk.slice(0, instead ? talk.indexOf(instead) : talk.length), {role: "user", content: text}];
  answer(before, text, instead !== undefined);
}

function regenerate(message) {
  const before = talk;
  talk = talk.slice(0, talk.indexOf(message));
  answer(before, "");
}

// Ask for an answer to the last question. If nothing of it arrives, the conversation is `before` again, and the question
// is in the input field, or if it was edited, in the field where it was edited.
async function answer(before, asked, edited = false) {
  const said = {role: "assistant", content: "", thought: "", tokens: [], note: "waiting for the first token"};
  const messages = talk.map(({role, content}) => ({role, content}));
  const mine = running = {stop: new AbortController(), before, asked, said, begun: false, ended: false};
  talk.push(said);
  welcome();
  show();
  remember();
  scrollTo(0, document.body.scrollHeight);
  try {
    const stream = await ask("v1/chat/completions", {method: "POST", signal: mine.stop.signal,
      more: {"X-Session-Id": session}, body: {messages, stream: true, stream_options: {include_drafted: true}}});
    for await (const [, data] of eventsOf(stream)) if (data !== "[DONE]") take(mine, JSON.parse(data));
    if (!mine.ended) throw new Error("The answer was cut: the connection ended.");
  } catch (error) {
    const stopped = mine.stop.signal.aborted;
    if (!mine.ended) said.note = stopped ? "stopped" : "interrupted";
    if (!mine.ended && !stopped) fail(error);
  }
  running = null;
  if (!mine.begun) {
    talk = before;
    if (!edited) field.value = withTyped(asked);
  }
  const free = [document.body, at("stop")].includes(document.activeElement) && getSelection().isCollapsed;
  itemOf(said).querySelector(".note").textContent = said.note;
  show();
  remember();
  if (free) field.focus();
}

function take(run, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const {said} = run, place = itemOf(said);
  const low = innerHeight + scrollY >= document.body.scrollHeight - 40;
  for (const choice of chunk.choices) {
    const {content, reasoning_content: thought} = choice.delta;
    if (thought) {
      said.thought += thought;
      if (!place.querySelector(".thought")) place.querySelector(".text").before(thoughtOf(""));
      place.querySelector(".thought .text").textContent = said.thought;
    }
    if (content) {
      const token = [content, choice.drafted === true];
      said.content += content;
      said.tokens.push(token);
      place.querySelector(":scope > .text").append(tokenOf(token));
    }
    if (content || thought) said.note = "";
    if (choice.finish_reason) {
      said.note = (said.content ? "" : "(no text) ") + figuresOf(chunk, choice.finish_reason);
      run.ended = true;
    }
    run.begun ||= Boolean(content || thought || choice.finish_reason);
    if (run.begun) left = null;
    place.querySelector(".note").textContent = said.note;
  }
  if (low) scrollTo(0, document.body.scrollHeight);
}

// The figures of an answer, in words.
function figuresOf(chunk, reason) {
  const {predicted_n: tokens, predicted_per_second: speed, draft_n: drafted, draft_n_accepted: accepted} = chunk.timings;
  const each = chunk.tokens_per_round;
  const speeds = (speed ? `, ${rate(speed)} a second` : "") + (each ? `, ${each.toFixed(2)} a round` : "");
  const how = drafted ? `${accepted} of ${drafted} drafted tokens accepted` : "nothing drafted";
  const cut = reason === "length" ? "; cut at the server's limit of tokens" : "";
  return `${tokens} token${tokens === 1 ? "" : "s"}${speeds}, ${how}${cut}`;
}

at("ask").onsubmit = event => {
  event.preventDefault();
  const text = field.value;
  if (running || !text.trim()) return;
  field.value = "";
  say(text);
};
// In Safari the Enter that confirms a composition is no longer composing; its key code is still 229. On a phone, where
// there is no Shift+Enter for a new line, only the button sends.
field.onkeydown = event => {
  if (matchMedia("(pointer: coarse)").matches) return;
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
};
at("stop").onclick = () => running?.stop.abort();
at("new").onclick = () => {
  if (talk.length) left = [talk, session];
  goTo([[], newSession()]);
};
at("back").onclick = () => { const to = left; left = null; goTo(to); };
function goTo(to) {
  [talk, session] = to;
  remember();
  show();
  field.focus();
}
at("mark").onchange = () => at("talk").classList.toggle("marked", at("mark").checked);

async function begin() {
  try {
    const name = (await call("v1/models")).data[0].id;
    at("model").textContent = document.title = name;
    welcome();
  } catch (error) {
    fail(error);
    if (error.status === 503) setTimeout(begin, AGAIN);
  }
}
withKey(begin);
addEventListener("pagehide", remember);
document.addEventListener("visibilitychange", () => { if (document.hidden) remember(); });
field.value = sessionStorage.getItem("typed") || "";
if (talk.at(-1)?.role === "user") field.value = withTyped(talk.pop().content);
show();
begin();
