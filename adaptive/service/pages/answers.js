"use strict";
// The list of answers: shows the drafter of each token, and forgets answers.

// The log's names of drafters and their labels; each has its own style (style.css).
const DRAFTERS = {model: "the draft model", head: "the draft head", history: "history: said before",
  grammar: "the grammar left no choice"};
// Answers fetched at a time.
const PAGE = 15;

let oldest = null;  // id of the oldest answer shown

const made = (name, text, kind) => {
  const one = document.createElement(name);
  if (text !== undefined) one.textContent = text;
  if (kind) one.className = kind;
  return one;
};

async function showAnswers() {
  const wanted = Math.max(PAGE, at("answers-list").childElementCount);
  const found = await call(`adaptive/answers?limit=${Math.min(100, wanted)}`);
  const known = new Map([...at("answers-list").children].map(row => [row.dataset.answer, row]));
  at("answers-list").replaceChildren(...found.answers.map(one => known.get(String(one.id)) || rowOf(one)));
  place(found);
}

async function showOlder() {
  const found = await call(`adaptive/answers?limit=${PAGE}&before=${oldest}`);
  at("answers-list").append(...found.answers.map(rowOf));
  place(found);
}

function place(found) {
  if (found.answers.length) oldest = found.answers[found.answers.length - 1].id;
  at("older").hidden = !found.more;
  at("no-answers").hidden = at("answers-list").childElementCount > 0;
}

function rowOf(one) {
  const row = made("li");
  row.dataset.answer = one.id;
  const head = made("div", undefined, "head"), open = made("button", one.asked || "(no question)", "asked");
  open.setAttribute("aria-expanded", "false");
  open.onclick = () => toggle(row, one.id, open).catch(fail);
  const forget = made("button", "Forget", "quiet"), session = made("button", "Forget its session", "quiet");
  forget.onclick = () => forgetAnswer(one).catch(fail);
  session.onclick = () => forgetSession(one).catch(fail);
  const buttons = made("span");
  buttons.append(forget, session);
  head.append(open, buttons);
  const speed = one.tokens_per_second ? `, ${one.tokens_per_second.toFixed(0)} a second` : "";
  const drafted = one.drafted ? `, ${one.accepted} of ${one.drafted} drafted tokens accepted` : ", nothing drafted";
  row.append(head, made("div", `${new Date(1000 * one.created).toLocaleString()} · session ${one.session} · `
    + `${count(one.tokens, "token", "tokens")}${speed}${drafted}`, "soft"));
  return row;
}

async function toggle(row, id, button) {
  const there = row.querySelector(".whole");
  button.setAttribute("aria-expanded", String(!there));
  if (there) return there.remove();
  const found = await call(`adaptive/answers/${id}`);
  const whole = made("div", undefined, "whole");
  whole.append(legendOf(found), tokensOf(found), made("div", inWords(found), "soft"));
  if (!row.querySelector(".whole")) row.append(whole);
}

// The text with each drafted token as an element of its own, with a style and a title.
function tokensOf(found) {
  const text = made("div", undefined, "said");
  for (const token of found.tokens) {
    if (token.drafter === null) text.append(token.text);
    else {
      const one = made("span", token.text, `token ${token.drafter in DRAFTERS ? token.drafter : "other"}`);
      one.title = `drafted by ${DRAFTERS[token.drafter] || token.drafter}`;
      text.append(one);
    }
  }
  return text;
}

function legendOf(found) {
  const list = made("ul", undefined, "legend");
  for (const name of new Set(found.tokens.map(token => token.drafter))) {
    const entry = made("li");
    if (name === null) entry.append(made("span", "plain"), "the target's own");
    else entry.append(made("span", "drafted", `token ${name in DRAFTERS ? name : "other"}`), `by ${DRAFTERS[name] || name}`);
    list.append(entry);
  }
  return list;
}

function inWords(found) {
  const counts = new Map();
  for (const token of found.tokens) counts.set(token.drafter, (counts.get(token.drafter) || 0) + 1);
  const said = [...counts].map(([name, n]) => `${n} ${name === null ? "by the target" : `drafted by ${DRAFTERS[name] || name}`}`);
  return `Of ${count(found.tokens.length, "token", "tokens")}: ${said.join(", ")}.`
    + (found.adapter ? ` Adapter ${found.adapter}.` : "") + ` Ended: ${found.finish_reason}.`;
}

function confirmed(what) {
  const box = at("confirm");
  at("confirm-what").textContent = what;
  box.returnValue = "no";
  box.showModal();
  return new Promise(done => { box.onclose = () => done(box.returnValue === "yes"); });
}

async function forgetAnswer(one) {
  const found = await call(`adaptive/answers/${one.id}`);
  const with_it = found.held_by.length ? `, and ${count(found.held_by.length, "later answer that holds", "later answers that hold")} it in the conversation before` : "";
  if (!await confirmed(`Forget this answer and its question${with_it}?`)) return;
  await call(`adaptive/answers/${one.id}`, {method: "DELETE"});
  await showAnswers();
}

async function forgetSession(one) {
  const path = "adaptive/sessions/" + encodeURIComponent(one.session);
  const found = await call(path);
  if (!await confirmed(`Forget the session ${one.session}, ${count(found.answers, "answer", "answers")}?`)) return;
  await call(path, {method: "DELETE"});
  await showAnswers();
}
