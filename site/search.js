/* How the search weighs what it found: what explains comes before the code that is explained. */
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("source/") ? score - 100 : score),
  // The rest is as Sphinx has it, which takes all of this object or nothing.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
