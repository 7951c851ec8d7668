// The other processes of a group: what is sent to them and what has come from them, and the thread that waits for it.
//
// Each process holds the columns of its ranks and the tokens of its ranks. A lookup tells every peer the ids, and sends
// it the own columns of the rows of its tokens; an update sends it the columns that it holds of the own tokens'
// gradient rows, and later the subtree sums of the own columns. One message for each pair of processes, whatever the
// number of ranks. What is the same everywhere (distinct ids, statistics, norm) every process computes for itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/transport.h"
#include "context/arena.h"
#include "context/column_sharded.h"
#include "context/notice.h"
#include "context/packed_columns.h"
#include "context/peer_threads.h"
#include "context/process_map.h"
#include "context/spec.h"

namespace async_emb::context {

class Peers {
 public:
  // `spec` is kept by reference.
  Peers(const ContextSpec& spec, const core::ColumnLayout& layout, ProcessMap map,
        std::shared_ptr<comm::Transport> transport);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  const ProcessMap& map() const { return map_; }

  PeerThreads& threads() { return threads_; }
  const PeerThreads& threads() const { return threads_; }

  // What follows is for their communication thread and throws comm::TransportError.

  // Everybody's notice, by process. `ids`, of the whole group in token order, come with it: those of this process's
  // tokens are there, the others are filled in. Null for a start that was refused here.
  const std::vector<Notice>& begin_lookup(const Notice& mine, std::int32_t* ids);
  void exchange_rows(const ColumnSharded& work, const BatchIds& batch, std::span<const void* const> tables);
  // As begin_lookup, with the gradient rows that were staged: those of the peers' tokens go to `grads`, [tokens, held
  // width].
  const std::vector<Notice>& begin_update(const Notice& mine, void* grads);
  void exchange_ids(std::int32_t* ids);
  // `sums`: [unique, subtrees of all ranks], those of this process's ranks are there. The others are filled in for a
  // slice of the rows, whose statistics are this process's to work out: with two processes all rows, else a share, so
  // that what one sends does not grow with the number of processes.
  struct Slice {
    std::int64_t begin;
    std::int64_t end;
  };
  bool slices() const { return peers_.size() > 2; }
  Slice exchange_subtree_sums(float* sums, std::int64_t unique);
  // `statistics`: [unique], this process's slice is there.
  void exchange_statistics(float* statistics, std::int64_t unique);

  // The columns that peers hold, of the part'th of `parts` pieces of a rank's tokens, after exchange_rows.
  void unpack_rows(int rank, int part, int parts, void* destination) const;
  // Keeps the columns of a rank's gradient rows that peers hold, for the next begin_update, and gives them back.
  void stage(int rank, const void* grads);
  void unstage(int rank, void* grads) const;

  // Bytes that have left this process.
  std::int64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  std::int64_t bytes() const;  // of the buffers

 private:
  struct Peer {
    std::int64_t tokens = 0;
    Buffer ids_out, ids_in;      // Notice and ids
    Buffer rows_out, rows_in;    // [its tokens, own columns], [own tokens, its columns]
    Buffer grads_out, grads_in;  // Notice and [own tokens, its columns], Notice and [its tokens, own columns]
    // As grads_out, of a start that was refused here: what is staged may change before it has left. Nobody writes more
    // than the notice, so it takes no memory beyond that.
    Buffer refusal_out;
    Buffer sums_in;  // [own slice of the rows, its subtrees]
  };

  void exchange(Buffer Peer::* out, Buffer Peer::* in);
  void exchange_blocks();
  Slice slice_of(std::size_t process, std::int64_t unique) const;
  const std::vector<Notice>& read_notices(const Notice& mine, Buffer Peer::* in);

  const ContextSpec& spec_;
  const ProcessMap map_;
  const std::shared_ptr<comm::Transport> transport_;
  std::vector<PackedColumns> columns_;   // by process: within rows of the table
  std::vector<PackedColumns> subtrees_;  // by process: within the subtree sums of a row
  std::vector<Peer> peers_;              // by process; the own one's buffers are empty
  Buffer sums_out_;                      // [unique, own subtrees]
  std::vector<Notice> notices_;
  std::vector<comm::Block> sent_;
  std::vector<comm::Inbox> received_;
  std::atomic<std::int64_t> bytes_sent_{0};
  PeerThreads threads_;
};

}  // namespace async_emb::context
