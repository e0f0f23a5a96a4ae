-- Draws a fence for a try that took the lock, when its INCR returned a number that is far too small (the counter was
-- lost) or an error.
-- KEYS lock queue fence polls   ARGV token seen_fence
-- replies the fence, also written into the value | "not ours"
-- errors  FENCE
--#head
local value = redis.pcall('GET', lock)
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then return 'not ours' end
redis.call('ZREM', queue, '') -- permitted when memory is full, and the next writes then are too
local fence, err = next_fence(ARGV[2])
if not fence then return err end
redis.call('SETRANGE', lock, 39, fence)
return fence
