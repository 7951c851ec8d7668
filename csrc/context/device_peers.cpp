#include "context/device_peers.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace async_emb::context {
namespace {

// Where sections of a message begin: what the widest load needs, and any copy.
std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

DevicePeers::DevicePeers(const ContextSpec& spec, const core::ColumnLayout& layout, ProcessMap map, DeviceLinks links,
                         cuda::Device& lead, Pulse::Reached reached)
    : spec_(spec),
      map_(std::move(map)),
      links_(std::move(links)),
      places_(static_cast<std::size_t>(spec.group_size)),
      sums_at_(static_cast<std::size_t>(spec.group_size)),
      peers_(map_.ranks.size()),
      notices_(map_.ranks.size()),
      sent_(map_.ranks.size()),
      received_(map_.ranks.size()),
      pulse_(std::make_shared<Pulse>(links_.pulse, spec.timeout_seconds, std::move(reached))),
      threads_(links_.notices, spec.timeout_seconds,
               {.before_leaving = [pulse = pulse_] { pulse->leave(); },
                .at_end =
                    [pulse = pulse_, bytes = links_.bytes] {
                      pulse->end();
                      bytes->abort();
                    }}) {
  const std::int64_t element = core::size_of(spec.dtype);
  const std::int64_t unique = std::min(spec.num_unique, spec.tokens());
  std::vector<std::int64_t> sum_floats(map_.ranks.size());
  for (std::size_t process = 0; process < map_.ranks.size(); ++process) {
    const std::vector<int>& ranks = map_.ranks[process];
    columns_.push_back(PackedColumns::of_ranks(ranks, spec.shard_width() * element, spec.emb_width * element));
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const auto rank = static_cast<std::size_t>(ranks[i]);
      places_[rank] = static_cast<std::int64_t>(i);
      sums_at_[rank] = sum_floats[process];
      sum_floats[process] += core::checked_product("row statistics", {unique, layout.subtree_count(ranks[i])});
    }
  }
  const int self = map_.self;
  const std::int64_t own_ranks = ranks_of(self);
  common_ = {lead, grads_at(self)};
  if (!spec.lookup_only) {
    own_grads_ = {lead, core::checked_product("gradient rows", {own_ranks, block_of(self)})};
    sums_out_ = {lead, sum_floats[static_cast<std::size_t>(self)] * 4};
  }
  for (int process = 0; process < map_.size(); ++process) {
    if (process == self) continue;
    Peer& peer = peers_[static_cast<std::size_t>(process)];
    peer.rows_out = {lead, core::checked_product("rows for a peer", {ranks_of(process), block_of(self)})};
    peer.rows_in = {lead, core::checked_product("rows from a peer", {own_ranks, block_of(process)})};
    std::int64_t first_in = grads_at(process);
    if (!spec.lookup_only) {
      first_in += core::checked_product("gradient rows from a peer", {ranks_of(process), block_of(self)});
      peer.first_out = {lead, grads_at(self) + own_ranks * block_of(process)};
      peer.sums_in = {lead, sum_floats[static_cast<std::size_t>(process)] * 4};
    }
    peer.first_in = {lead, first_in};
  }
}

DevicePeers::~DevicePeers() { close(); }

void DevicePeers::close() noexcept {
  pulse_->leave();
  pulse_->stop();
  links_.bytes->abort();
}

std::int64_t DevicePeers::pending_at() { return aligned(sizeof(cuda::PeerWord)); }
std::int64_t DevicePeers::ids_at(int process) const { return pending_at() + aligned(ranks_of(process) * 4); }
std::int64_t DevicePeers::grads_at(int process) const {
  return ids_at(process) + aligned(ranks_of(process) * spec_.tokens_per_rank * 4);
}

const std::vector<Notice>& DevicePeers::exchange_notices(const Notice& mine) {
  constexpr std::int64_t kBytes = sizeof(Notice);
  std::vector<comm::Block> sent(notices_.size());
  std::vector<comm::Inbox> received(notices_.size());
  notices_[static_cast<std::size_t>(map_.self)] = mine;
  for (std::size_t process = 0; process < notices_.size(); ++process) {
    if (static_cast<int>(process) == map_.self) continue;
    sent[process] = {&mine, kBytes};
    received[process] = {&notices_[process], kBytes};
    bytes_sent_.fetch_add(kBytes, std::memory_order_relaxed);
  }
  links_.notices->exchange(sent, received,
                           std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::duration<double>(std::min(spec_.timeout_seconds, 1e8))));
  return notices_;
}

void DevicePeers::exchange(cuda::Stream stream) {
  sent_[static_cast<std::size_t>(map_.self)] = {};
  received_[static_cast<std::size_t>(map_.self)] = {};
  links_.bytes->exchange(sent_, received_, stream);
  for (const comm::Block& block : sent_) bytes_sent_.fetch_add(block.bytes, std::memory_order_relaxed);
}

void DevicePeers::exchange_ids(cuda::Stream stream) {
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    sent_[process] = {common_.get(), common_.bytes()};
    received_[process] = {peers_[process].first_in.get(), grads_at(static_cast<int>(process))};
  }
  exchange(stream);
}

void DevicePeers::exchange_rows(cuda::Stream stream) {
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    sent_[process] = {peers_[process].rows_out.get(), peers_[process].rows_out.bytes()};
    received_[process] = {peers_[process].rows_in.get(), peers_[process].rows_in.bytes()};
  }
  exchange(stream);
}

void DevicePeers::spread_common(cuda::Device& lead, cuda::Stream stream) const {
  for (const Peer& peer : peers_) {
    if (peer.first_out.bytes() > 0) lead.copy(peer.first_out.get(), common_.get(), common_.bytes(), stream);
  }
}

void DevicePeers::exchange_grads(cuda::Stream stream) {
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    sent_[process] = {peers_[process].first_out.get(), peers_[process].first_out.bytes()};
    received_[process] = {peers_[process].first_in.get(), peers_[process].first_in.bytes()};
  }
  exchange(stream);
}

void DevicePeers::exchange_sums(cuda::Stream stream) {
  for (std::size_t process = 0; process < peers_.size(); ++process) {
    sent_[process] = {sums_out_.get(), sums_out_.bytes()};
    received_[process] = {peers_[process].sums_in.get(), peers_[process].sums_in.bytes()};
  }
  exchange(stream);
}

std::int64_t DevicePeers::bytes() const {
  std::int64_t total = common_.bytes() + own_grads_.bytes() + sums_out_.bytes();
  for (const Peer& peer : peers_) {
    for (const cuda::DeviceArray<char>* array :
         {&peer.first_out, &peer.first_in, &peer.rows_out, &peer.rows_in, &peer.sums_in}) {
      total += array->bytes();
    }
  }
  return total;
}

}  // namespace async_emb::context
