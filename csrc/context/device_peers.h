// The other processes of a group on GPUs: what this process's GPU, the lead, sends to theirs and gets from them.
//
// Each process holds the columns of its ranks and the tokens of its ranks, and one of its GPUs, that of its first rank,
// speaks for all. A lookup sends every peer the ids, and then the own columns of the rows of its tokens; an update
// sends it the ids with the columns that it holds of the own tokens' gradient rows, and then the subtree sums of the
// own columns. One message for each pair of processes, whatever the number of ranks. All sizes are known to the hosts.
//
//     first message    PeerWord | pending of each rank | ids of each rank | gradient rows, of updates alone
//
// Before anything of a start is put on a stream, the hosts agree about it by exchanging notices: no GPU ever waits for
// an exchange that another process does not make.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/device_transport.h"
#include "comm/transport.h"
#include "context/notice.h"
#include "context/packed_columns.h"
#include "context/peer_threads.h"
#include "context/process_map.h"
#include "context/pulse.h"
#include "context/spec.h"
#include "core/layout.h"
#include "cuda/handles.h"

namespace async_emb::context {

// What leads to the other processes of a group on GPUs. The hosts' two are between the same processes.
struct DeviceLinks {
  std::shared_ptr<comm::Transport> notices;
  std::shared_ptr<comm::Transport> pulse;
  std::shared_ptr<comm::DeviceTransport> bytes;
};

class DevicePeers {
 public:
  // `spec` is kept by reference. `lead` is current.
  DevicePeers(const ContextSpec& spec, const core::ColumnLayout& layout, ProcessMap map, DeviceLinks links,
              cuda::Device& lead, Pulse::Reached reached);
  ~DevicePeers();
  DevicePeers(const DevicePeers&) = delete;
  DevicePeers& operator=(const DevicePeers&) = delete;

  const ProcessMap& map() const { return map_; }
  PeerThreads& threads() { return threads_; }
  const PeerThreads& threads() const { return threads_; }
  Pulse& pulse() { return *pulse_; }

  // Leaves the others when the GPUs of all have finished, or within the timeout. Then no exchange is on a stream any
  // more, and nothing asks `reached`.
  void close() noexcept;

  // ---- what follows is for the communication thread

  // Everybody's notice, by process. Throws comm::TransportError.
  const std::vector<Notice>& exchange_notices(const Notice& mine);

  // Each puts one exchange on the lead's stream. Throws std::runtime_error.
  void exchange_ids(cuda::Stream stream);
  void exchange_rows(cuda::Stream stream);
  void exchange_grads(cuda::Stream stream);
  void exchange_sums(cuda::Stream stream);

  // ---- places in the lead's memory

  // The first message as far as it is the same for all: to be written here, and sent from here with the ids.
  cuda::PeerWord* own_word() const { return reinterpret_cast<cuda::PeerWord*>(common_.get()); }
  std::int32_t* own_pending(int rank) const { return at<std::int32_t>(common_.get() + pending_at(), rank, 4); }
  std::int32_t* own_ids(int rank) const {
    return at<std::int32_t>(common_.get() + ids_at(map_.self), rank, spec_.tokens_per_rank * 4);
  }
  // Copies it in front of the gradient rows for every peer.
  void spread_common(cuda::Device& lead, cuda::Stream stream) const;

  // What has come from another process, or from one of its ranks.
  const cuda::PeerWord* word(int process) const {
    return reinterpret_cast<const cuda::PeerWord*>(peer(process).first_in.get());
  }
  const std::int32_t* pending(int rank) const { return at<std::int32_t>(in_of(rank) + pending_at(), rank, 4); }
  std::int32_t* ids(int rank) const {
    return at<std::int32_t>(peer_of(rank).first_in.get() + ids_at(map_.process_of(rank)), rank,
                            spec_.tokens_per_rank * 4);
  }

  // Own columns of the rows of a peer's rank's tokens, and its columns of an own rank's: [tokens_per_rank, columns].
  char* rows_out(int rank) const { return at<char>(peer_of(rank).rows_out.get(), rank, block_of(map_.self)); }
  const char* rows_in(int process, int rank) const {
    return peer(process).rows_in.get() + place(rank) * block_of(process);
  }
  // Of an own rank's gradient rows the columns that `process` holds, which may be this one; and of a rank's anywhere
  // the own columns.
  char* grads_out(int process, int rank) const {
    if (process == map_.self) return at<char>(own_grads_.get(), rank, block_of(process));
    return at<char>(peer(process).first_out.get() + grads_at(map_.self), rank, block_of(process));
  }
  const char* grads(int rank) const {
    const int process = map_.process_of(rank);
    if (process == map_.self) return grads_out(process, rank);
    return at<char>(peer(process).first_in.get() + grads_at(process), rank, block_of(map_.self));
  }
  // Subtree sums of a rank's columns: [unique, its subtrees].
  float* sums_out(int rank) const { return reinterpret_cast<float*>(sums_out_.get()) + sums_at(rank); }
  const float* sums(int rank) const {
    return reinterpret_cast<const float*>(peer_of(rank).sums_in.get()) + sums_at(rank);
  }

  // The columns of a process within whole rows.
  const PackedColumns& columns(int process) const { return columns_[static_cast<std::size_t>(process)]; }
  std::int64_t place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }  // among its process's ranks

  std::int64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  std::int64_t bytes() const;  // of the buffers

 private:
  struct Peer {
    cuda::DeviceArray<char> first_out, first_in;
    cuda::DeviceArray<char> rows_out, rows_in;
    cuda::DeviceArray<char> sums_in;
  };

  const Peer& peer(int process) const { return peers_[static_cast<std::size_t>(process)]; }
  const Peer& peer_of(int rank) const { return peer(map_.process_of(rank)); }
  // What its process has sent first.
  const char* in_of(int rank) const { return peer_of(rank).first_in.get(); }
  template <typename T>
  T* at(char* section, int rank, std::int64_t bytes) const {
    return reinterpret_cast<T*>(section + place(rank) * bytes);
  }
  template <typename T>
  const T* at(const char* section, int rank, std::int64_t bytes) const {
    return reinterpret_cast<const T*>(section + place(rank) * bytes);
  }
  std::int64_t ranks_of(int process) const {
    return static_cast<std::int64_t>(map_.ranks[static_cast<std::size_t>(process)].size());
  }
  static std::int64_t pending_at();
  std::int64_t ids_at(int process) const;
  std::int64_t grads_at(int process) const;  // where the first message of that process without them ends
  // One rank's tokens, the columns that `process` holds.
  std::int64_t block_of(int process) const { return spec_.tokens_per_rank * columns(process).bytes(); }
  std::int64_t sums_at(int rank) const { return sums_at_[static_cast<std::size_t>(rank)]; }
  void exchange(cuda::Stream stream);

  const ContextSpec& spec_;
  const ProcessMap map_;
  const DeviceLinks links_;
  std::vector<PackedColumns> columns_;  // by process
  std::vector<std::int64_t> places_;    // by rank
  std::vector<std::int64_t> sums_at_;   // by rank, in floats, within what its process sends
  cuda::DeviceArray<char> common_, own_grads_, sums_out_;
  std::vector<Peer> peers_;  // by process; the own one's buffers are empty
  std::vector<Notice> notices_;
  std::vector<comm::Block> sent_;
  std::vector<comm::Inbox> received_;
  std::atomic<std::int64_t> bytes_sent_{0};
  // The listening thread may end it after this object has gone.
  std::shared_ptr<Pulse> pulse_;
  PeerThreads threads_;
};

}  // namespace async_emb::context
