// A cache in blocks: sequences with their block tables, and whose tokens lie in which block. Part 12.
//
// A memory is the plan of a cache at one moment:
//   block_size: tokens of a block, P
//   references: [B] for each block, in how many tables it stands
//   known: numbers of the blocks that the prefix cache can find
//   free: numbers of the blocks without a reference, the next to be given away first
//   sequences: [{name, computed, known, table, words}]: how many of its first tokens have keys and values, how many
//     are known, its blocks in order, and the text of each token (may be left out)
//   swapped: [{name, blocks}] in the swap space (may be left out)
