-- Releases the lock. The holder gave up its belief before this was sent.
-- KEYS lock queue fence polls   ARGV token provisional_ms
-- replies "released" | "not ours" | "again"
local lock, queue = KEYS[1], KEYS[2]
local value = redis.pcall('GET', lock)
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then return 'not ours' end
if value:sub(5, 5) == '0' then
  redis.call('DEL', lock)
  return 'released'
end
-- The usual hand-off, without the shared functions: building them takes as long as all of this.
-- They handle every other case: full memory, a lost counter, a waiter that polls or is gone.
--#limits
local first = redis.pcall('ZRANGE', queue, 0, 1)
local token, inbox, ttl, owner
if first[1] then token, inbox, ttl, owner = first[1]:match('^(%S+) (%S+) (%d+) %d+ (.*)$') end
if token and inbox ~= '-' then
  local f = redis.pcall('INCR', KEYS[3])
  if type(f) == 'number' and f >= FENCE_SANE_MIN and f <= FENCE_MAX then
    local fence = string.format('%016.0f', f)
    local ms = tonumber(ttl) < tonumber(ARGV[2]) and ttl or ARGV[2]
    redis.call('ZREM', queue, first[1])
    if (redis.pcall('PUBSUB', 'SHARDNUMSUB', inbox)[2] or 0) > 0 then
      local hint, where
      if first[2] then
        local next
        next, where = first[2]:match('^(%S+) (%S+)')
        hint = where and where ~= '-' and 'N ' .. next .. ' ' .. ms
      end
      -- The server writes first to the client that it queued output for last. So a message for another process is
      -- queued before the grant; within one process the grant comes first.
      if hint and where ~= inbox then redis.pcall('SPUBLISH', where, hint) end
      redis.pcall('SPUBLISH', inbox, 'G ' .. token .. ' ' .. fence .. ' ' .. ms)
      if hint and where == inbox then redis.pcall('SPUBLISH', where, hint) end
      local now = redis.call('TIME')
      local since = string.format('%s%03d', now[1], now[2] / 1000)
      local rest = ' ' .. token .. ' ' .. fence .. ' ' .. inbox .. ' ' .. since .. ' ' .. ttl .. ' ' .. owner
      redis.call('SET', lock, (first[2] and 'lh1 1' or 'lh1 0') .. rest, 'PX', ms)
      return 'released'
    end
  end
end
--#head
return pass_on(tonumber(ARGV[2])) and 'released' or 'again'
