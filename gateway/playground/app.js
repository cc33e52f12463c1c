// The playground: asks its gateway and shows where each token came from and where each round's time went.

const byId = (id) => document.getElementById(id);
const PARTS = ["draft_wait_us", "path_us", "queue_us", "pass_us", "sample_us"];
const NAMES = { draft_wait_us: "draft", path_us: "way", queue_us: "queue", pass_us: "pass", sample_us: "sample" };

let messages = []; // of the conversation so far
let last = null; // { body, path, text, heading } of the last answer
let running = null; // AbortController
let current = null; // the view with the rounds beside the conversation

function element(name, fields = {}, ...children) {
  const node = Object.assign(document.createElement(name), fields);
  node.append(...children);
  return node;
}

function headers() {
  const key = byId("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function report(problem) {
  byId("problem").textContent = problem;
  byId("problem").hidden = !problem;
}

// The data of server-sent events, parsed.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function problemOf(response) {
  let message = response.statusText;
  try { message = (await response.json()).error.message; } catch { /* not in our shape */ }
  if (response.status === 401) return `${message}. Put an API key into the settings.`;
  if (response.status === 429) return `${message}. Try again in a moment.`;
  return `${response.status}: ${message}`;
}

// One answer as it comes: its tokens as spans, and its rounds beside them.
class View {
  constructor(text, aside) {
    this.text = text; // element
    this.aside = aside; // whether the figures beside the conversation are this answer's
    this.letters = []; // code points that no token has yet
    this.taken = 0; // code points before them
    this.tokens = []; // spans
    this.starts = []; // of rounds: index of the first token
    this.firstBase = null;
    this.counts = { draft: 0, lookup: 0, correction: 0, bonus: 0 };
    this.proposed = this.accepted = this.longest = 0;
    this.begun = performance.now();
    this.first = null;
    this.waiting = []; // elements to append at the next frame
    this.newRounds = [];
  }

  add(choice) {
    this.first ??= performance.now();
    this.letters.push(...(choice.delta?.content ?? choice.text ?? ""));
    const { origins, rounds, text_ends } = choice.specdec ?? { origins: [], rounds: [], text_ends: [] };
    rounds.forEach((round) => this.addRound(round));
    origins.forEach((origin, index) => {
      const size = text_ends[index] - this.taken;
      const span = element("span", { className: "token", textContent: this.letters.splice(0, size).join("") });
      span.dataset.origin = origin;
      span.dataset.token = this.tokens.length;
      this.taken = text_ends[index];
      this.counts[origin] += 1;
      this.tokens.push(span);
      this.waiting.push(span);
    });
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  addRound(round) {
    this.firstBase ??= round.base;
    this.starts.push(round.base - this.firstBase);
    this.proposed += round.num_draft_tokens;
    this.accepted += round.num_accepted_tokens;
    this.longest = Math.max(this.longest, total(round));
    this.newRounds.push(round);
  }

  show() {
    this.frame = null;
    this.text.append(...this.waiting.splice(0));
    byId("log").scrollTop = byId("log").scrollHeight;
    if (!this.aside) return;
    const list = byId("rounds");
    list.append(...this.newRounds.splice(0).map(row));
    list.style.setProperty("--longest", this.longest);
    list.scrollTop = list.scrollHeight;
    for (const output of document.querySelectorAll("[data-count]"))
      output.textContent = this.counts[output.dataset.count];
    const seconds = ((this.ended ?? performance.now()) - this.begun) / 1e3;
    figure("rate", (this.tokens.length / seconds).toFixed(1));
    figure("length", this.starts.length ? (this.tokens.length / this.starts.length).toFixed(2) : "–");
    figure("accepted", this.proposed ? `${this.accepted} of ${this.proposed}` : "–");
    figure("first", `${Math.round(this.first - this.begun)} ms`);
  }

  end() {
    if (this.letters.length) this.waiting.push(this.letters.splice(0).join(""));
    if (this.frame) cancelAnimationFrame(this.frame);
    this.ended = performance.now();
    this.first ??= performance.now();
    this.show();
  }
}

const total = (round) => PARTS.reduce((sum, part) => sum + round[part], 0);

function row(round) {
  const bar = element("span", { className: "bar" });
  for (const part of PARTS) {
    const piece = element("i");
    piece.dataset.part = part;
    piece.style.width = `calc(100% * ${round[part]} / max(1, var(--longest)))`;
    bar.append(piece);
  }
  const refused = round.num_draft_tokens - round.num_accepted_tokens;
  const dots = "●".repeat(round.num_accepted_tokens) + "○".repeat(refused);
  const took = `${(total(round) / 1e3).toFixed(1)} ms`;
  const parts = PARTS.map((part) => `${NAMES[part]} ${(round[part] / 1e3).toFixed(1)} ms`).join(", ");
  const item = element(
    "li",
    { title: `round ${round.round}: ${round.num_accepted_tokens} of ${round.num_draft_tokens} accepted; ${parts}` },
    bar,
    element("span", { className: "dots", textContent: dots }),
    element("span", { className: "took", textContent: took }),
  );
  item.dataset.round = round.round;
  return item;
}

function figure(name, value) {
  document.querySelector(`[data-figure="${name}"]`).textContent = value;
}

// Hover on a token lights up its round, and all tokens of this round. The rounds shown are those of the last answer.
function light(view, span) {
  for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
  if (!span || view !== current) return;
  const token = Number(span.dataset.token);
  let round = view.starts.findLastIndex((start) => start <= token);
  if (round < 0) return;
  view.tokens.slice(view.starts[round], view.starts[round + 1]).forEach((token) => token.classList.add("lit"));
  const item = byId("rounds").children[round];
  item?.classList.add("lit");
  item?.scrollIntoView({ block: "nearest" });
}

async function run(path, body, view) {
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) { report(await problemOf(response)); return false; }
    for await (const event of events(response)) {
      if (event.error) { report(event.error.message); return false; }
      if (event.choices?.length) view.add(event.choices[0]);
    }
    return true;
  } catch (error) {
    if (error.name !== "AbortError") report(`The gateway cannot be reached: ${error.message}`);
    return false;
  } finally {
    view.end();
    running = null;
    busy(false);
  }
}

function busy(is) {
  byId("send").disabled = is;
  byId("stop").disabled = !is;
  byId("compare").disabled = is || !last;
}

function number(id) {
  const value = byId(id).value;
  return value === "" ? null : Number(value);
}

function bodyOf(prompt) {
  const chat = byId("mode").value === "chat";
  const seed = number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const body = {
    stream: true, return_origins: true, seed,
    temperature: number("temperature"), max_tokens: number("max-tokens"), num_draft_tokens: number("draft-tokens"),
  };
  const schema = byId("schema").value.trim();
  if (schema) body.structured_outputs = { json: schema };
  if (!chat) return ["v1/completions", { ...body, prompt }];
  const system = byId("system").value.trim();
  const before = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { ...body, messages: [...before, ...messages, { role: "user", content: prompt }] }];
}

function turn(who, ...children) {
  byId("log").querySelector(".hint")?.remove();
  const node = element("div", { className: "turn" }, element("h3", { textContent: who }), ...children);
  byId("log").append(node);
  return node;
}

function watched(view) {
  view.text.addEventListener("pointerover", (event) => light(view, event.target.closest(".token")));
  view.text.addEventListener("pointerleave", () => light(view, null));
  return view;
}

async function ask(event) {
  event?.preventDefault();
  const prompt = byId("prompt").value;
  if (running || !prompt) return;
  report("");
  const [path, body] = bodyOf(prompt);
  turn("you", element("p", { textContent: prompt }));
  const text = element("p");
  const answer = turn(`answer, seed ${body.seed}`, text);
  byId("rounds").replaceChildren();
  const view = (current = watched(new View(text, true)));
  last = null;
  const whole = await run(path, body, view);
  if (!view.tokens.length) {
    answer.remove();
    return;
  }
  last = { path, body, text, answer, view, whole };
  if (body.messages) messages.push({ role: "user", content: prompt }, { role: "assistant", content: text.textContent });
  byId("prompt").select();
  busy(false);
}

async function compare() {
  if (running || !last) return;
  report("");
  const { path, body, text, answer, view, whole } = last;
  const other = element("p");
  const pair = element("div", { className: "pair" });
  text.replaceWith(pair);
  pair.append(
    element("div", {}, element("h3", { textContent: "with speculation" }), text),
    element("div", {}, element("h3", { textContent: "without" }), other),
  );
  const alone = new View(other, false);
  const ended = await run(path, { ...body, num_draft_tokens: 0 }, alone);
  if (!ended) return;
  const [first, second] = [text.textContent, other.textContent];
  const same = whole ? first === second : second.startsWith(first);
  const rate = (one) => (one.tokens.length / (one.ended - one.begun)) * 1e3;
  const verdict = element("p", {
    className: "verdict",
    textContent: same
      ? `identical: ${alone.tokens.length} tokens, the same ones without speculation (${rate(alone).toFixed(1)} per second)`
      : "the texts differ",
  });
  verdict.dataset.same = same;
  answer.append(verdict);
  last = null;
  busy(false);
  byId("log").scrollTop = byId("log").scrollHeight;
}

function clear() {
  running?.abort();
  messages = [];
  last = null;
  byId("log").replaceChildren();
  byId("rounds").replaceChildren();
  report("");
  busy(false);
  byId("prompt").focus();
}

async function describe() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) { byId("model").textContent = ""; report(await problemOf(response)); return; }
    const [model] = (await response.json()).data;
    byId("model").textContent = `${model.id}, ${model.max_model_len.toLocaleString("en")} tokens of context`;
    report("");
  } catch (error) {
    report(`The gateway cannot be reached: ${error.message}`);
  }
}

byId("ask").addEventListener("submit", ask);
byId("stop").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", compare);
byId("clear").addEventListener("click", clear);
byId("mode").addEventListener("change", clear);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
  if (event.key === "Escape") running?.abort();
});
byId("key").value = sessionStorage.getItem("key") ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem("key", byId("key").value);
  describe();
});
describe();
