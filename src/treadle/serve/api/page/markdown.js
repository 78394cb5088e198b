// Shows a model's text: paragraphs, headings, lists, quotes and code. Every piece of it becomes a text node, never
// HTML, and there are no links or images: what a model says cannot make the browser load or run anything.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;

// Shows one text that grows; what is unchanged of it stays in the page as it is, with its selection.
export class Rendered {
  constructor(parent) {
    this.parent = parent;
    this.shown = []; // the source of each block
  }

  update(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && equal(blocks[same], this.shown[same])) same++;
    while (this.parent.children.length > same) this.parent.lastElementChild.remove();
    for (const block of blocks.slice(same)) this.parent.append(build(block));
    this.shown = blocks;
  }
}

function equal(one, other) {
  return one.kind === other.kind && one.name === other.name && one.text === other.text;
}

// Return the blocks of a text: {kind, text, name}.
function split(text) {
  const blocks = [];
  const lines = text.split("\n");
  let open = null; // the block that the next line may belong to
  const begin = (kind, line, name = "") => blocks.push((open = { kind, text: line, name }));
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const code = [];
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (++at < lines.length && !end.test(lines[at])) code.push(lines[at]);
      begin("code", code.join("\n"), fence[2]);
      open = null;
    } else if (!line.trim()) {
      open = null;
    } else if (/^#{1,6}\s/.test(line)) {
      begin("heading", line.replace(/^#+\s+/, ""));
      open = null;
    } else if (ITEM.test(line)) {
      if (blocks.at(-1)?.kind === "list") (open = blocks.at(-1)).text += `\n${line}`;
      else begin("list", line);
    } else if (/^\s*>/.test(line)) {
      const quoted = line.replace(/^\s*> ?/, "");
      if (open?.kind === "quote") open.text += `\n${quoted}`;
      else begin("quote", quoted);
    } else if (open) {
      open.text += `\n${line}`;
    } else {
      begin("paragraph", line);
    }
  }
  return blocks;
}

function build(block) {
  if (block.kind === "code") return code(block);
  if (block.kind === "list") return list(block.text.split("\n"));
  const element = document.createElement({ heading: "h3", quote: "blockquote", paragraph: "p" }[block.kind]);
  inline(element, block.text);
  return element;
}

function code(block) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = block.name || "text";
  caption.append(name);
  if (navigator.clipboard) caption.append(copyButton(() => block.text));
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // can be scrolled by keys
  const body = document.createElement("code");
  body.textContent = block.text;
  pre.append(body);
  figure.append(caption, pre);
  return figure;
}

// Return a button that copies what `text` returns when it is pressed.
export function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

function list(lines) {
  const levels = []; // {indent, element} from the outermost list to the innermost
  let item = null;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (!found) {
      item.append("\n");
      inline(item, line.trim());
      continue;
    }
    const indent = found[1].length;
    while (levels.length > 1 && indent < levels.at(-1).indent) levels.pop();
    if (!levels.length || indent > levels.at(-1).indent + 1) {
      const element = document.createElement(found[2] ? "ol" : "ul");
      if (found[2]) element.start = Number(found[2]);
      item?.append(element);
      levels.push({ indent, element });
    }
    item = document.createElement("li");
    inline(item, found[3]);
    levels.at(-1).element.append(item);
  }
  return levels[0].element;
}

// Append `text` to `element`, with what stands between backticks and asterisks set off.
function inline(element, text, depth = 0) {
  const unclosed = new Set(); // marks that were looked for and do not come again
  let plain = 0;
  let at = 0;
  while (at < text.length) {
    if (text[at] !== "`" && text[at] !== "*") {
      at++;
      continue;
    }
    const mark = /^(?:`{1,64}|\*{1,2})/.exec(text.slice(at, at + 64))[0];
    const start = at + mark.length;
    const opens = mark[0] === "`" || (depth < 4 && /\S/.test(text.slice(start, start + 1)));
    const end = opens && !unclosed.has(mark) ? closing(text, mark, start) : -1;
    if (end < 0) {
      if (opens) unclosed.add(mark);
      at = start;
      continue;
    }
    element.append(text.slice(plain, at));
    const part = document.createElement({ "*": "em", "**": "strong" }[mark] ?? "code");
    if (mark[0] === "`") part.textContent = text.slice(start, end);
    else inline(part, text.slice(start, end), depth + 1);
    element.append(part);
    plain = at = end + mark.length;
  }
  element.append(text.slice(plain));
}

// Return where `mark` closes what it opened before `start`, -1 where it does not.
function closing(text, mark, start) {
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const alone = text[end - 1] !== mark[0] && text[end + mark.length] !== mark[0];
    if (alone && (mark[0] === "`" || /\S/.test(text[end - 1]))) return end;
  }
  return -1;
}
