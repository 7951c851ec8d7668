#include "context/peers.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/layout.h"

namespace async_emb::context {
namespace {

constexpr std::int64_t kNoticeBytes = (sizeof(Notice) + 63) / 64 * 64;

char* after_notice(const Buffer& buffer) { return buffer.as<char>() + kNoticeBytes; }

}  // namespace

Peers::Peers(const ContextSpec& spec, const core::ColumnLayout& layout, ProcessMap map,
             std::shared_ptr<comm::Transport> transport)
    : spec_(spec), map_(std::move(map)), transport_(std::move(transport)), threads_(transport_, spec.timeout_seconds) {
  const std::int64_t element = core::size_of(spec.dtype);
  const std::int64_t row_bytes = spec.emb_width * element;
  const std::int64_t unique = std::min(spec.num_unique, spec.tokens());
  for (const std::vector<int>& ranks : map_.ranks) {
    columns_.push_back(PackedColumns::of_ranks(ranks, spec.shard_width() * element, row_bytes));
    std::vector<PackedColumns::Run> runs;
    for (const int rank : ranks) runs.push_back({layout.subtree_begin(rank) * 4, layout.subtree_count(rank) * 4});
    subtrees_.emplace_back(runs, layout.total_subtrees() * 4);
  }
  const auto self = static_cast<std::size_t>(map_.self);
  const std::int64_t own_tokens = static_cast<std::int64_t>(map_.local().size()) * spec.tokens_per_rank;
  peers_.resize(map_.ranks.size());
  notices_.resize(map_.ranks.size());
  sent_.resize(map_.ranks.size());
  received_.resize(map_.ranks.size());
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (process == self) continue;
    Peer& peer = peers_[process];
    peer.tokens = static_cast<std::int64_t>(map_.ranks[process].size()) * spec.tokens_per_rank;
    peer.ids_out = Buffer(kNoticeBytes + own_tokens * 4);
    peer.ids_in = Buffer(kNoticeBytes + peer.tokens * 4);
    peer.rows_out = Buffer(core::checked_product("rows for a peer", {peer.tokens, columns_[self].bytes()}));
    peer.rows_in = Buffer(core::checked_product("rows from a peer", {own_tokens, columns_[process].bytes()}));
    if (spec.lookup_only) continue;
    peer.grads_out = Buffer(kNoticeBytes + own_tokens * columns_[process].bytes());
    peer.refusal_out = Buffer(peer.grads_out.bytes());
    peer.grads_in = Buffer(kNoticeBytes + peer.tokens * columns_[self].bytes());
    const Slice slice = slice_of(self, unique);
    peer.sums_in = Buffer((slice.end - slice.begin + 1) * subtrees_[process].bytes());  // slices differ by a row
    // Before anything is staged its place is sent along with a notice that says so.
    std::memset(peer.grads_out.as<char>(), 0, static_cast<std::size_t>(peer.grads_out.bytes()));
  }

  if (!spec.lookup_only) sums_out_ = Buffer(unique * subtrees_[self].bytes());
}

void Peers::exchange_blocks() {
  const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(spec_.timeout_seconds, 1e8)));
  transport_->exchange(sent_, received_, timeout);
  for (std::size_t process = 0; process < sent_.size(); ++process) {
    if (static_cast<int>(process) != map_.self) bytes_sent_.fetch_add(sent_[process].bytes, std::memory_order_relaxed);
  }
}

void Peers::exchange(Buffer Peer::* out, Buffer Peer::* in) {
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    const Buffer& to = peers_[process].*out;
    const Buffer& from = peers_[process].*in;
    sent_[process] = {to.as<void>(), to.bytes()};
    received_[process] = {from.as<void>(), from.bytes()};
  }
  exchange_blocks();
}

const std::vector<Notice>& Peers::read_notices(const Notice& mine, Buffer Peer::* in) {
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (static_cast<int>(process) == map_.self) {
      notices_[process] = mine;
    } else {
      std::memcpy(static_cast<void*>(&notices_[process]), (peers_[process].*in).as<char>(), sizeof(Notice));
    }
  }
  return notices_;
}

const std::vector<Notice>& Peers::begin_lookup(const Notice& mine, std::int32_t* ids) {
  const std::size_t block = static_cast<std::size_t>(spec_.tokens_per_rank);
  for (Peer& peer : peers_) {
    if (peer.tokens == 0) continue;
    std::memcpy(peer.ids_out.as<char>(), &mine, sizeof(mine));
    auto* out = reinterpret_cast<std::int32_t*>(after_notice(peer.ids_out));
    for (const int rank : map_.local()) {
      if (ids != nullptr) {
        std::copy_n(ids + static_cast<std::size_t>(spec_.token_blocks[static_cast<std::size_t>(rank)]) * block, block,
                    out);
      } else {
        std::fill_n(out, block, -1);
      }
      out += block;
    }
  }
  exchange(&Peer::ids_out, &Peer::ids_in);
  if (ids != nullptr) {
    for (std::size_t process = 0; process < peers_.size(); ++process) {
      if (peers_[process].tokens == 0) continue;
      const auto* in = reinterpret_cast<const std::int32_t*>(after_notice(peers_[process].ids_in));
      for (const int rank : map_.ranks[process]) {
        std::copy_n(in, block,
                    ids + static_cast<std::size_t>(spec_.token_blocks[static_cast<std::size_t>(rank)]) * block);
        in += block;
      }
    }
  }
  return read_notices(mine, &Peer::ids_in);
}

void Peers::exchange_rows(const ColumnSharded& work, const BatchIds& batch, std::span<const void* const> tables) {
  const std::int64_t block = spec_.tokens_per_rank * columns_[static_cast<std::size_t>(map_.self)].bytes();
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (peers_[process].tokens == 0) continue;
    char* out = peers_[process].rows_out.as<char>();
    for (const int rank : map_.ranks[process]) {
      work.gather_for_peer(batch, tables, rank, out);
      out += block;
    }
  }
  exchange(&Peer::rows_out, &Peer::rows_in);
}

void Peers::unpack_rows(int rank, int part, int parts, void* destination) const {
  const auto& local = map_.local();
  const std::int64_t place = std::find(local.begin(), local.end(), rank) - local.begin();
  const std::int64_t begin = spec_.tokens_per_rank * part / parts;
  const std::int64_t end = spec_.tokens_per_rank * (part + 1) / parts;
  char* out = static_cast<char*>(destination) + begin * spec_.emb_width * core::size_of(spec_.dtype);
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (peers_[process].tokens == 0) continue;
    const char* in = peers_[process].rows_in.as<char>();
    columns_[process].unpack(in + (place * spec_.tokens_per_rank + begin) * columns_[process].bytes(), end - begin,
                             out);
  }
}

void Peers::stage(int rank, const void* grads) {
  const auto& local = map_.local();
  const std::int64_t place = std::find(local.begin(), local.end(), rank) - local.begin();
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (peers_[process].tokens == 0) continue;
    char* out = after_notice(peers_[process].grads_out);
    columns_[process].pack(grads, spec_.tokens_per_rank,
                           out + place * spec_.tokens_per_rank * columns_[process].bytes());
  }
}

void Peers::unstage(int rank, void* grads) const {
  const auto& local = map_.local();
  const std::int64_t place = std::find(local.begin(), local.end(), rank) - local.begin();
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (peers_[process].tokens == 0) continue;
    const char* in = after_notice(peers_[process].grads_out);
    columns_[process].unpack(in + place * spec_.tokens_per_rank * columns_[process].bytes(), spec_.tokens_per_rank,
                             grads);
  }
}

const std::vector<Notice>& Peers::begin_update(const Notice& mine, void* grads) {
  Buffer Peer::* const out = mine.refused ? &Peer::refusal_out : &Peer::grads_out;
  for (Peer& peer : peers_) {
    if (peer.tokens > 0) std::memcpy((peer.*out).as<char>(), &mine, sizeof(mine));
  }
  exchange(out, &Peer::grads_in);
  const std::int64_t block = spec_.tokens_per_rank * columns_[static_cast<std::size_t>(map_.self)].bytes();
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (peers_[process].tokens == 0) continue;
    const char* in = after_notice(peers_[process].grads_in);
    for (const int rank : map_.ranks[process]) {
      std::memcpy(static_cast<char*>(grads) + spec_.token_blocks[static_cast<std::size_t>(rank)] * block, in,
                  static_cast<std::size_t>(block));
      in += block;
    }
  }
  return read_notices(mine, &Peer::grads_in);
}

void Peers::exchange_ids(std::int32_t* ids) { begin_lookup({}, ids); }

Peers::Slice Peers::slice_of(std::size_t process, std::int64_t unique) const {
  const auto count = static_cast<std::int64_t>(peers_.size());
  if (!slices()) return {0, unique};
  const auto place = static_cast<std::int64_t>(process);
  return {unique * place / count, unique * (place + 1) / count};
}

Peers::Slice Peers::exchange_subtree_sums(float* sums, std::int64_t unique) {
  const auto self = static_cast<std::size_t>(map_.self);
  const Slice mine = slice_of(self, unique);
  const std::int64_t own_bytes = subtrees_[self].bytes();
  subtrees_[self].pack(sums, unique, sums_out_.as<void>());
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    const Slice theirs = slice_of(process, unique);
    sent_[process] = {sums_out_.as<char>() + theirs.begin * own_bytes, (theirs.end - theirs.begin) * own_bytes};
    received_[process] = {peers_[process].sums_in.as<void>(), (mine.end - mine.begin) * subtrees_[process].bytes()};
  }
  exchange_blocks();
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    if (process == self) continue;
    const PackedColumns& their = subtrees_[process];
    their.unpack(peers_[process].sums_in.as<void>(), mine.end - mine.begin, sums + mine.begin * their.row_bytes() / 4);
  }
  return mine;
}

void Peers::exchange_statistics(float* statistics, std::int64_t unique) {
  const Slice mine = slice_of(static_cast<std::size_t>(map_.self), unique);
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    const Slice theirs = slice_of(process, unique);
    sent_[process] = {statistics + mine.begin, (mine.end - mine.begin) * 4};
    received_[process] = {statistics + theirs.begin, (theirs.end - theirs.begin) * 4};
  }
  exchange_blocks();
}

std::int64_t Peers::bytes() const {
  std::int64_t total = sums_out_.bytes();
  for (const Peer& peer : peers_) {
    for (const Buffer* buffer :
         {&peer.ids_out, &peer.ids_in, &peer.rows_out, &peer.rows_in, &peer.grads_out, &peer.grads_in, &peer.sums_in}) {
      total += buffer->bytes();
    }
  }
  return total;
}

}  // namespace async_emb::context
