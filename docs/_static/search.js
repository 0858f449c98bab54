/*
 * Sphinx's search, with five changes: pages are ordered by all words of a query, a page that has the query among its
 * keywords comes first, so does an object whose name is the query, an excerpt is the passage that has most of its words,
 * and only whole words are marked. Sphinx takes the best word of a query alone, the first place of its last word, and
 * marks "step" in "timestep".
 */
"use strict";

// Pages that show how to do something come before pages that explain how dtkit is made.
const FOLDER_SCORES = [
  [/^how-to\/(?!index)/, 12],
  [/^guides\/(?!index)/, 10],
  [/^(concepts\/|tutorials\/0|glossary|example)/, 6],
  [/^reference\//, 4],
  [/^(decisions\/|architecture|contributing|tried|scale|index$|.*\/index$)/, -25],
];
const NAMED_SCORE = 200; // more than any page has
const KEYWORD_SCORE = 60; // more than the words of a page have
const EXCERPT_LENGTH = 240;
const PASSAGES = "p, li, tr, pre"; // code counts less than prose

const splitIntoWords = (text) => text.toLowerCase().match(/[\p{Letter}\p{Number}_]+/gu) || [];

/** Return the stems of a text's words that count, as Sphinx's index has them. */
const stemWords = (text) => {
  const stemmer = new Stemmer();
  return splitIntoWords(text).filter((word) => !stopwords.has(word)).map((word) => stemmer.stemWord(word));
};

/** Return whether an entry of Sphinx's index, a number or a list, has this page. */
const hasPage = (entry, page) => entry === page || (Array.isArray(entry) && entry.includes(page));

/** Return whether a page has the whole query among its keywords; docs/conf.py marks these with "=". */
const isKeywordOf = (query, page) => {
  const keyword = new Stemmer().stemWord(`=${splitIntoWords(query).join(" ")}`);
  return hasPage(Search._index.terms[keyword], page);
};

/** Return the score of one page for a query: words of its title, of one of its headings and of its text. */
const scorePage = (page, stems) => {
  const { terms, titleterms, titles, alltitles } = Search._index;
  const headings = Object.keys(alltitles).filter((heading) => alltitles[heading].some(([file]) => file === page));
  const inText = stems.filter((stem) => hasPage(terms[stem], page) || hasPage(titleterms[stem], page)).length;
  const inHeadings = Math.max(0, ...headings.map((heading) => countShare(heading, stems)));
  return 20 * countShare(titles[page], stems) + 12 * inHeadings + (8 * inText) / stems.length;
};

/** Return 1 if the text has all these stems, and much less if it has some. */
const countShare = (text, stems) => {
  const found = stemWords(text);
  return (stems.filter((stem) => found.includes(stem)).length / stems.length) ** 2;
};

/** Return whether a query is the end of an object's name, from a dot on: "cluster.train(" is that of dtkit.Cluster.train. */
const isNameOf = (query, fullName) => {
  const name = query.trim().toLowerCase().replace(/\(.*$/, "");
  return name.includes(".") && `.${fullName.toLowerCase()}`.endsWith(`.${name}`);
};

const scoreResult = ([document_, title, , , score, , kind]) => {
  const query = new URLSearchParams(window.location.search).get("q") || "", stems = stemWords(query);
  if (kind === "object" && isNameOf(query, title)) return NAMED_SCORE;
  const folder = FOLDER_SCORES.find(([pattern]) => pattern.test(document_))?.[1] ?? 0;
  const page = Search._index.docnames.indexOf(document_);
  if (kind === "text" && stems.length > 0) {
    return folder + scorePage(page, stems) + (isKeywordOf(query, page) ? KEYWORD_SCORE : 0);
  }
  return folder + score + (kind === "title" ? 10 : 0);
};

/** Return the first of the passages with most words of the query, as a paragraph. */
const makeExcerpt = (html, stems, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  page.querySelectorAll(".headerlink, script, style, svg, nav, math").forEach((element) => element.remove());
  const article = page.querySelector("article.bd-article, [role=main]");
  const part = (anchor && article?.querySelector(anchor.replaceAll(".", "\\."))) || article;
  let best = { count: -1, text: "" };
  for (const element of part?.querySelectorAll(PASSAGES) || []) {
    const text = element.textContent.replace(/\s+/g, " ").trim();
    const found = new Set(stemWords(text));
    const count = [...stems].filter((stem) => found.has(stem)).length - (element.matches("pre") ? 0.5 : 0);
    if (count > best.count) best = { count, text };
  }
  const paragraph = document.createElement("p");
  paragraph.classList.add("context", "nohighlight"); // the latter keeps Sphinx from marking parts of words
  paragraph.textContent = cutOut(best.text, stems);
  markWords(paragraph, stems);
  return paragraph;
};

/** Return a part of the text around the first of these words. */
const cutOut = (text, stems) => {
  if (text.length <= EXCERPT_LENGTH) return text;
  const isWanted = (word) => stemWords(word).some((stem) => stems.has(stem));
  const first = [...text.matchAll(/[\p{Letter}\p{Number}_]+/gu)].find((match) => isWanted(match[0]))?.index ?? 0;
  const start = first < EXCERPT_LENGTH / 2 ? 0 : text.lastIndexOf(" ", first - 60) + 1;
  const end = text.length - start <= EXCERPT_LENGTH ? text.length : text.lastIndexOf(" ", start + EXCERPT_LENGTH);
  return `${start > 0 ? "... " : ""}${text.slice(start, end)}${end < text.length ? " ..." : ""}`;
};

/** Mark the words with these stems in all text of an element. */
const markWords = (element, stems) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    if (text.parentElement.closest("script, style, svg, math, button, select, textarea")) continue;
    const parts = text.data.split(/([\p{Letter}\p{Number}_]+)/u); // words are at odd places
    const isFound = (part, place) => place % 2 === 1 && stemWords(part).some((stem) => stems.has(stem));
    if (!parts.some(isFound)) continue;
    text.replaceWith(...parts.map((part, place) => {
      if (!isFound(part, place)) return part;
      const mark = document.createElement("span");
      mark.classList.add("highlighted");
      mark.textContent = part;
      return mark;
    }));
  }
};

// Sphinx marks parts of words in the page that a reader opens from the results. It marks nothing now.
SphinxHighlight.highlightSearchWords = () => localStorage.removeItem("sphinx_highlight_terms");

// Before Sphinx's own start, which was registered later.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  Scorer.score = scoreResult;
  Search.makeSearchSummary = makeExcerpt;
});
