#include "block_copy.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace quire {
namespace {

// A piece of every block at a time: it fits a thread's scratch, and there is work for all threads.
constexpr int64_t kPiece = 64 << 10;
static_assert(kPiece <= static_cast<int64_t>(kThreadScratch));

void check_block(int64_t block, int64_t num_blocks) {
  if (block < 0 || block >= num_blocks)
    throw std::invalid_argument("block " + std::to_string(block) + " is not one of " + std::to_string(num_blocks));
}

}  // namespace

BlockCopies::BlockCopies(const int64_t* pairs, int64_t num_pairs, int64_t num_blocks) {
  std::unordered_map<int64_t, int64_t> source_of;  // of destinations that are not written yet
  std::unordered_map<int64_t, int64_t> readers;    // copies to come that read a block
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int64_t source = pairs[2 * i], destination = pairs[2 * i + 1];
    for (int64_t block : {source, destination}) check_block(block, num_blocks);
    if (!source_of.emplace(destination, source).second)
      throw std::invalid_argument("block " + std::to_string(destination) + " is written twice");
    if (source == destination) continue;
    ++readers[source];
  }
  for (int64_t i = 0; i < num_pairs; ++i)
    if (pairs[2 * i] == pairs[2 * i + 1]) source_of.erase(pairs[2 * i]);
  // A block is written once no pair reads it any more; then its source may become writable, and so on.
  auto write_from = [&](int64_t destination) {
    for (;;) {
      auto entry = source_of.find(destination);
      if (entry == source_of.end()) return;
      auto reading = readers.find(destination);
      if (reading != readers.end() && reading->second > 0) return;
      const int64_t source = entry->second;
      source_of.erase(entry);
      copies_.push_back({source, destination});
      if (source == kAside) return;
      --readers[source];
      destination = source;
    }
  };
  for (int64_t i = 0; i < num_pairs; ++i) write_from(pairs[2 * i + 1]);
  // What is left are cycles: each block is read once, by the next. Set one aside and its reader reads that.
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int64_t first = pairs[2 * i + 1];
    auto entry = source_of.find(first);
    if (entry == source_of.end()) continue;
    int64_t reader = first;
    for (int64_t block = entry->second; block != first; block = source_of.at(block)) reader = block;
    source_of[reader] = kAside;
    copies_.push_back({first, kAside});
    --readers[first];
    write_from(first);
  }
}

void BlockCopies::run(Pool& pool, const std::vector<uintptr_t>& pages, int64_t block_bytes) const {
  if (copies_.empty()) return;
  struct Work {
    const std::vector<Copy>& copies;
    const std::vector<uintptr_t>& pages;
    int64_t block_bytes, pieces;
  } work{copies_, pages, block_bytes, (block_bytes + kPiece - 1) / kPiece};
  pool.run(
      [](void* argument, Team& team) {
        const Work& work = *static_cast<Work*>(argument);
        const int64_t total = static_cast<int64_t>(work.pages.size()) * work.pieces;
        for (int64_t i = team.take(); i < total; i = team.take()) {
          const int64_t start = i % work.pieces * kPiece;
          auto* page = reinterpret_cast<std::byte*>(work.pages[static_cast<std::size_t>(i / work.pieces)]) + start;
          const auto size = static_cast<std::size_t>(std::min<int64_t>(kPiece, work.block_bytes - start));
          auto place = [&](int64_t block) { return block == kAside ? team.scratch() : page + block * work.block_bytes; };
          for (const Copy& copy : work.copies) std::memcpy(place(copy.destination), place(copy.source), size);
        }
      },
      &work);
}

void move_blocks(const std::vector<uintptr_t>& sources, const std::vector<uintptr_t>& destinations, int64_t block_bytes,
                 int64_t num_source_blocks, int64_t num_destination_blocks, const int64_t* pairs, int64_t num_pairs) {
  if (sources.size() != destinations.size()) throw std::invalid_argument("as many pages on either side are expected");
  for (int64_t i = 0; i < num_pairs; ++i) {
    check_block(pairs[2 * i], num_source_blocks);
    check_block(pairs[2 * i + 1], num_destination_blocks);
  }
  for (std::size_t page = 0; page < sources.size(); ++page) {
    const auto* from = reinterpret_cast<const std::byte*>(sources[page]);
    auto* to = reinterpret_cast<std::byte*>(destinations[page]);
    for (int64_t i = 0; i < num_pairs; ++i)
      std::memcpy(to + pairs[2 * i + 1] * block_bytes, from + pairs[2 * i] * block_bytes,
                  static_cast<std::size_t>(block_bytes));
  }
}

}  // namespace quire
