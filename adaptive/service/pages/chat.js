"use strict";
// A chat with the served model. Messages are only inserted as text of a node, never as markup.

const at = id => document.getElementById(id);
const field = at("ask").querySelector("textarea");

// The conversation, kept in this tab's session storage: [{role, content, thought, tokens: [[text, drafted]], note}].
let talk = JSON.parse(sessionStorage.getItem("talk") || "[]");
let session = sessionStorage.getItem("session") || newSession();
let running = null;  // the AbortController of the answer in progress

function newSession() {
  return `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
}

function remember() {
  sessionStorage.setItem("talk", JSON.stringify(talk));
  sessionStorage.setItem("session", session);
}

function made(name, text, kind) {
  const one = document.createElement(name);
  if (text) one.textContent = text;
  if (kind) one.className = kind;
  return one;
}

function button(text, press) {
  const one = made("button", text, "quiet");
  one.disabled = running !== null;
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

function itemOf(message, number) {
  const item = made("li", null, message.role), text = made("div", null, "text");
  item.append(made("span", message.role === "user" ? "You" : "Answer", "soft"));
  if (message.thought) item.append(thoughtOf(message.thought));
  if (message.tokens) text.append(...message.tokens.map(tokenOf));
  else text.textContent = message.content;
  const foot = made("div", null, "row"), buttons = made("span");
  if (message.role === "user") buttons.append(button("Edit", () => edit(item, number)));
  else buttons.append(button("Regenerate", () => { talk.length = number; answer(); }),
    button("Copy", () => navigator.clipboard?.writeText(message.content)));
  foot.append(made("span", message.note, "soft note"), buttons);
  item.append(text, foot);
  return item;
}

function thoughtOf(text) {
  const box = made("details", null, "thought");
  box.append(made("summary", "Thoughts"), made("div", text, "text"));
  return box;
}

function show() {
  at("hint").hidden = talk.length > 0;
  at("talk").replaceChildren(...talk.map(itemOf));
  at("talk").setAttribute("aria-busy", String(running !== null));
  at("send").hidden = at("new").disabled = running !== null;
  at("stop").hidden = running === null;
}

// Replace a question by a field to edit it. Sending it drops all later messages.
function edit(item, number) {
  const box = made("textarea"), send = made("button", "Send again"), leave = made("button", "Cancel", "quiet");
  box.value = talk[number].content;
  box.rows = Math.min(10, 1 + box.value.split("\n").length);
  box.setAttribute("aria-label", "your message, changed");
  send.onclick = () => { if (box.value.trim()) { talk.length = number; say(box.value); } };
  leave.onclick = show;
  item.replaceChildren(box, send, leave);
  box.focus();
}

function say(text) {
  talk.push({role: "user", content: text});
  answer();
}

async function answer() {
  const mine = running = new AbortController();
  const said = {role: "assistant", content: "", thought: "", tokens: [], note: ""};
  const messages = talk.map(({role, content}) => ({role, content}));
  talk.push(said);
  welcome();
  show();
  const place = at("talk").lastElementChild;
  said.note = "waiting for the first token";
  place.querySelector(".note").textContent = said.note;
  try {
    const stream = await ask("v1/chat/completions", {method: "POST", signal: mine.signal, more: {"X-Session-Id": session},
      body: {messages, stream: true, stream_options: {include_drafted: true}}});
    for await (const [, data] of eventsOf(stream)) if (data !== "[DONE]") take(said, place, JSON.parse(data));
  } catch (error) {
    if (mine.signal.aborted) said.note = "stopped";
    else {
      said.note = "";
      fail(error);
    }
  }
  running = null;
  if (!said.content && !said.thought) {
    talk.pop();
    if (!said.note || said.note === "stopped") giveBack();
  }
  remember();
  show();
  field.focus();
}

// Put an unanswered question back into the input field.
function giveBack() {
  const last = talk[talk.length - 1];
  if (!field.value && last?.role === "user") {
    field.value = last.content;
    talk.pop();
  }
}

function take(said, place, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
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
    if (choice.finish_reason) said.note = ended(chunk, choice.finish_reason);
    else if (content || thought) said.note = "";
    place.querySelector(".note").textContent = said.note;
  }
  if (low) scrollTo(0, document.body.scrollHeight);
}

// The figures of an answer, in words.
function ended(chunk, reason) {
  const {predicted_n: tokens, predicted_per_second: speed, draft_n: drafted, draft_n_accepted: accepted} = chunk.timings;
  const how = drafted ? `${accepted} of ${drafted} drafted tokens accepted` : "nothing drafted";
  const cut = reason === "length" ? "; cut at the server's limit of tokens" : "";
  return `${tokens} token${tokens === 1 ? "" : "s"}, ${speed.toFixed(0)} a second, ${how}${cut}`;
}

at("ask").onsubmit = event => {
  event.preventDefault();
  const text = field.value;
  if (running || !text.trim()) return;
  field.value = "";
  say(text);
};
field.onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
};
at("stop").onclick = () => running?.abort();
at("new").onclick = () => { [talk, session] = [[], newSession()]; remember(); show(); field.focus(); };
at("mark").onchange = () => at("talk").classList.toggle("marked", at("mark").checked);

async function begin() {
  try {
    const name = (await call("v1/models")).data[0].id;
    at("model").textContent = document.title = name;
    welcome();
  } catch (error) { fail(error); }
}
withKey(begin);
show();
begin();
