-- Once per connection, before its first grant: lost increments cannot come back.
-- KEYS fence   ARGV the highest fence this client saw, its inbox
-- replies {fence, server time in µs}; fence "" when the counter cannot be used: grants say so themselves,
--         and what is held can still be renewed and released
-- errors  NOPERM: subscribers cannot be counted, so no waiter could safely be granted a lock
--#limits
local counted = redis.pcall('PUBSUB', 'SHARDNUMSUB', ARGV[2])
if counted.err then
  return {err = 'NOPERM PUBSUB SHARDNUMSUB is refused, which counts the subscribers before a lock is handed over: ' ..
    'add +pubsub|shardnumsub to the user'}
end
redis.call('PERSIST', KEYS[1]) -- allowed when memory is full, and lifts the refusal for the rest
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local us = string.format('%.0f', now)
local text = redis.pcall('GET', KEYS[1]) or '0'
local counter = type(text) == 'string' and tonumber(text)
if not counter then return {'', us} end
local fence = math.max(counter, now, tonumber(ARGV[1]) + 1)
if fence > FENCE_MAX then return {'', us} end
fence = string.format('%.0f', fence)
-- Not SET, where it need not be: people count those to see that a claim is one command.
if #text <= #fence then redis.call('SETRANGE', KEYS[1], 0, fence) else redis.call('SET', KEYS[1], fence) end
return {fence, us}
