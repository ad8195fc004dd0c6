// A conversation as a tree of turns, by functions that return a new conversation and change none.
//
//   question 1 ─┬─ answer 1 ── question 2 ── answer 2    the path from the root to `leaf` is shown and sent
//               └─ answer 1 again                        another branch: kept, not shown and not sent
//
// conversation: { id, title, created, updated, leaf, settings, turns }
//   leaf: id of the last shown turn; null for none. settings: of the form of parameters.
//   turns: oldest first. title: "" for the beginning of the first question.
// turn: { id, parent, role, content, … }
//   role: user, assistant or tool. Of an answer also: reasoning, toolCalls [{ id, name, arguments }],
//   ending (null while it is generated), error, stats. Of a question also: images [{ id, url }], data URIs.
//   Of a tool's result also: toolCallId.

const ROLES = ["user", "assistant", "tool"];
const FORMAT = "tokend conversations";
const TITLE_LENGTH = 80;

/** Returns a new id, which is not guessable and not a number. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `t${Array.from(bytes, (each) => each.toString(16).padStart(2, "0")).join("")}`;
}

/** Returns an empty conversation. */
export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, leaf: null, settings: {}, turns: [] };
}

/** Returns a turn of a conversation; undefined if there is none. */
export const turnOf = (conversation, id) => conversation.turns.find((each) => each.id === id);

const childrenOf = (conversation, parent) => conversation.turns.filter((each) => each.parent === parent);

/** Returns the turns from the root to a turn; by default those that are shown. */
export function pathOf(conversation, id = conversation.leaf) {
  const turns = new Map(conversation.turns.map((each) => [each.id, each]));
  const path = [];
  for (let turn = turns.get(id); turn; turn = turns.get(turn.parent)) path.unshift(turn);
  return path;
}

/** Returns the conversation with one more turn, which becomes the last shown one. */
export function withTurn(conversation, turn) {
  const turns = [...conversation.turns, { id: newId(), ...turn }];
  return { ...conversation, turns, leaf: turns.at(-1).id, updated: Date.now() };
}

/** Returns the conversation with changed fields of one turn. */
export function withChange(conversation, id, fields) {
  const turns = conversation.turns.map((each) => (each.id === id ? { ...each, ...fields } : each));
  return { ...conversation, turns, updated: Date.now() };
}

/** Returns the conversation without a turn and all that follows it; a branch beside it is shown, else its parent. */
export function withoutTurn(conversation, id) {
  const removed = turnOf(conversation, id);
  if (!removed) return conversation;
  const gone = new Set([id]);
  for (const each of conversation.turns) if (gone.has(each.parent)) gone.add(each.id); // parents come first
  const turns = conversation.turns.filter((each) => !gone.has(each.id));
  const rest = { ...conversation, turns, updated: Date.now() };
  if (!gone.has(conversation.leaf)) return rest;
  const beside = childrenOf(rest, removed.parent).at(-1);
  return beside ? withBranch(rest, beside.id) : { ...rest, leaf: removed.parent };
}

/** Returns the ids of the branches at a turn, itself among them, oldest first. */
export const branchesAt = (conversation, turn) =>
  childrenOf(conversation, turn.parent).map((each) => each.id);

/** Returns the conversation with the branch of a turn shown, up to the newest turn that follows it. */
export function withBranch(conversation, id) {
  let leaf = id;
  for (let next = { id }; next; next = childrenOf(conversation, leaf).at(-1)) leaf = next.id;
  return { ...conversation, leaf };
}

/** Whether an answer came to nothing: refused, or stopped before its first text. */
export const isEmptyAnswer = (turn) =>
  turn.role === "assistant" && !turn.content && !turn.toolCalls?.length;

/**
 * Returns the turn that the next question follows; null for the root. After an answer that came to nothing the
 * question takes the place of the one before, so that no question is sent twice, and none that is not shown.
 */
export function lastAnswered(conversation) {
  const path = pathOf(conversation);
  while (path.length && isEmptyAnswer(path.at(-1))) {
    path.pop();
    while (path.at(-1)?.role === "user") path.pop();
  }
  return path.at(-1)?.id ?? null;
}

/**
 * Returns the messages of a request: the turns from the root to `id`. The reasoning of earlier answers is left
 * out, except since the last question, where the model goes on from it. kept: ids of images that the server has,
 * which are named instead of sent.
 */
export function messagesTo(conversation, id, system = "", kept = new Set()) {
  const path = pathOf(conversation, id).filter((turn) => !isEmptyAnswer(turn));
  const lastQuestion = path.findLastIndex((turn) => turn.role === "user");
  const messages = path.map((turn, at) => messageOf(turn, at > lastQuestion, kept));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function messageOf(turn, withReasoning, kept) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.toolCallId, content: turn.content };
  const message = { role: turn.role, content: turn.content };
  if (turn.images?.length) {
    const text = turn.content ? [{ type: "text", text: turn.content }] : [];
    const part = ({ id, url }) => ({ type: "image_url", image_url: kept.has(id) ? null : { url }, uuid: id });
    message.content = [...turn.images.map(part), ...text];
  }
  if (withReasoning && turn.reasoning) message.reasoning = turn.reasoning;
  if (turn.toolCalls?.length) {
    message.tool_calls = turn.toolCalls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  }
  return message;
}

/** Returns the name of a conversation in the list. */
export function titleOf(conversation) {
  const question = conversation.turns.find((each) => each.role === "user");
  const title = (conversation.title || question?.content || (question?.images ? "Image" : "")).trim().replace(/\s+/g, " ");
  return title.length > TITLE_LENGTH ? `${title.slice(0, TITLE_LENGTH - 1)}…` : title || "New chat";
}

/** Whether each of the words is in the title or in a turn. */
export function hasWords(conversation, words) {
  const texts = [titleOf(conversation), ...conversation.turns.map((each) => each.content)];
  const text = texts.join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/**
 * Returns the conversation that has the changes of two tabs. base: what both began with, null if unknown.
 * Turns of both are kept; one that either removed is gone; of a field that both changed, `mine` holds.
 */
export function merged(base, mine, theirs) {
  if (!theirs || !base || theirs.updated === base.updated) return mine;
  const before = new Map(base.turns.map((each) => [each.id, each]));
  const ours = new Map(mine.turns.map((each) => [each.id, each]));
  const others = new Set(theirs.turns.map((each) => each.id));
  const turns = theirs.turns
    .filter(({ id }) => ours.has(id) || !before.has(id))
    .map((each) => chosen(before.get(each.id), ours.get(each.id), each));
  turns.push(...mine.turns.filter(({ id }) => !others.has(id) && !before.has(id)));
  const ids = new Set(turns.map((each) => each.id));
  const known = turns.filter((each) => each.parent === null || ids.has(each.parent));
  const both = { ...chosen(base, mine, theirs), turns: known, updated: Date.now() };
  if (known.length < turns.length) both.turns = connected(known);
  const leaf = [both.leaf, mine.leaf, theirs.leaf].find((id) => both.turns.some((each) => each.id === id));
  return { ...both, leaf: leaf ?? both.turns.at(-1)?.id ?? null };
}

function chosen(base, mine, theirs) {
  if (!mine) return theirs;
  const fields = Object.keys({ ...theirs, ...mine }).map((name) => {
    const isMine = JSON.stringify(mine[name]) !== JSON.stringify(base?.[name]);
    return [name, isMine ? mine[name] : theirs[name]];
  });
  return Object.fromEntries(fields);
}

/** The turns whose parents are there, too. */
function connected(turns) {
  const ids = new Set([null]);
  return turns.filter((each) => ids.has(each.parent) && ids.add(each.id));
}

/** Returns the JSON of conversations, for a file. */
export const exported = (conversations) =>
  JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);

/** Returns the conversations of such a file; throws an Error that says what is wrong in it. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error(`The file has no conversations: "format" must be "${FORMAT}".`);
  }
  if (file.version !== 1) throw new Error("The file is of a newer version of the page.");
  return file.conversations.map(checked);
}

function checked(raw, at) {
  const check = (holds, what) => {
    if (!holds) throw new Error(`conversations[${at}]${what}`);
  };
  const isText = (value) => typeof value === "string";
  check(isText(raw?.id) && /^[\w-]{1,64}$/.test(raw.id), ".id must be 1 to 64 letters, digits, - or _.");
  check(isText(raw.title), ".title must be a text.");
  check(Array.isArray(raw.turns), ".turns must be a list.");
  const ids = new Set([null]);
  const turns = raw.turns.map((turn, index) => {
    const place = `.turns[${index}]`;
    check(isText(turn?.id) && !ids.has(turn.id), `${place}.id must be a text of its own.`);
    check(turn.parent === null || ids.has(turn.parent), `${place}.parent must be an earlier turn or null.`);
    check(ROLES.includes(turn.role), `${place}.role must be one of ${ROLES.join(", ")}.`);
    check(isText(turn.content), `${place}.content must be a text.`);
    ids.add(turn.id);
    const { id, parent, role, content } = turn;
    const kept = { id, parent, role, content };
    for (const name of ["reasoning", "toolCallId", "ending", "error"]) {
      if (isText(turn[name])) kept[name] = turn[name];
    }
    if (Array.isArray(turn.images)) {
      kept.images = turn.images.map((image) => {
        const isImage = isText(image?.id) && isText(image.url) && image.url.startsWith("data:image/");
        check(isImage, `${place}.images must have id and url, a data URI.`);
        return { id: image.id, url: image.url };
      });
    }
    if (Array.isArray(turn.toolCalls)) {
      kept.toolCalls = turn.toolCalls.map((call) => {
        const fields = [call?.id, call?.name, call?.arguments];
        check(fields.every(isText), `${place}.toolCalls must have id, name and arguments.`);
        return { id: call.id, name: call.name, arguments: call.arguments };
      });
    }
    if (role === "assistant") kept.ending ??= "interrupted";
    return kept;
  });
  const number = (value) => (Number.isFinite(value) ? value : Date.now());
  const leaf = ids.has(raw.leaf) && raw.leaf !== null ? raw.leaf : (turns.at(-1)?.id ?? null);
  const settings = {};
  for (const [name, value] of Object.entries(raw.settings ?? {})) {
    if (isText(value) || typeof value === "boolean") settings[name] = value;
  }
  return {
    ...{ id: raw.id, title: raw.title, created: number(raw.created), updated: number(raw.updated) },
    ...{ leaf, settings, turns },
  };
}
