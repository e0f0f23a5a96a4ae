-- Asks the holder that was inspected to finish.
-- KEYS lock   ARGV holder_id reason
-- replies {"told", value, ms_left} | {"deaf", value, ms_left} | {"changed hands", value, ms_left} | {"free"}
--#limits
local value, left = redis.pcall('GET', KEYS[1]), redis.call('PTTL', KEYS[1])
if type(value) == 'table' then value = redis.call('TYPE', KEYS[1]).ok end
if not value then return {'free'} end
if #value > VALUE_MAX then value = TOO_LONG end
local token, digits, inbox = value:match('^lh1 [01R] ([%w_%-]+) (%d+) (%S+) %d+ %d+ ')
local ours = token and #token == 32 and #digits == 16
if redis.sha1hex(ours and token or value):sub(1, #ARGV[1]) ~= ARGV[1] then
  return {'changed hands', value, left}
end
if not ours or inbox == '-' then return {'deaf', value, left} end
local heard = redis.pcall('SPUBLISH', inbox, 'F ' .. token .. ' ' .. ARGV[2])
return {heard == 0 and 'deaf' or 'told', value, left}
