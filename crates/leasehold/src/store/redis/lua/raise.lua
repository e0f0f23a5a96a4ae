-- Once per connection, before its first grant: lost increments cannot come back.
-- KEYS fence   ARGV the highest fence this client saw
-- replies {fence, server time in µs}; fence "" when the counter cannot be used: grants say so themselves,
--         and what is held can still be renewed and released
--#limits
redis.call('PERSIST', KEYS[1]) -- allowed when memory is full, and lifts the refusal for the rest
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local us = string.format('%.0f', now)
local counter = redis.pcall('GET', KEYS[1])
counter = counter == false and 0 or type(counter) == 'string' and tonumber(counter)
if not counter then return {'', us} end
local fence = math.max(counter, now, tonumber(ARGV[1]) + 1)
if fence > FENCE_MAX then return {'', us} end
fence = string.format('%.0f', fence)
redis.call('SET', KEYS[1], fence)
return {fence, us}
