// Ends waits that last longer than a pipeline's timeout. One thread for the process, asleep while no pipeline is open.
#pragma once

#include <memory>

namespace async_emb::context {

class GroupPipeline;

// Watches `pipeline` for as long as it lives.
void watch(const std::shared_ptr<GroupPipeline>& pipeline);

}  // namespace async_emb::context
