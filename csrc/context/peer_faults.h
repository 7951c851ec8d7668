// What an exchange that came to nothing means: who is to blame, in which call of which step.
#pragma once

#include <cstdint>

#include "comm/transport.h"
#include "context/call_checks.h"
#include "context/failure.h"
#include "context/peer_threads.h"
#include "context/process_map.h"

namespace async_emb::context {

// May take a moment, in which another process may say why it has given up: then that is the failure.
Failure failure_of(const comm::TransportError& error, const char* call, std::int64_t step, const CallChecks& check,
                   const ProcessMap& map, const PeerThreads& threads);

}  // namespace async_emb::context
