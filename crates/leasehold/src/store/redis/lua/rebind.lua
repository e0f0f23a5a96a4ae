-- Changes or removes a binding that exists and is as expected.
-- KEYS binding [slots]   ARGV claim revision node keep_ms slot payload
--   claim, revision: the expected ones, "" for any    node: the one whose slots are in KEYS
--   keep_ms: counted anew, "" to keep its end         slot: "keep" | "give back" | "remove" (the binding)
-- replies {"done"} | {"gone"} | {"other", value} | {"too long"}: a value of another client, nothing was done
--         {"node", node}: nothing was done, send it with the slots of this node
local value = redis.call('GETRANGE', KEYS[1], 0, STORED_MAX)
if value == '' and redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
if #value > STORED_MAX then return {'too long'} end
local claim, revision, keep, length, at = value:match('^lh1 (%S+) (%d+) (%d+) (%d+) ()')
if not claim then return {'other', value} end
if (ARGV[1] ~= '' and ARGV[1] ~= claim) or (ARGV[2] ~= '' and ARGV[2] ~= revision) then return {'other', value} end
local node = value:sub(at, at + length - 1)
if node ~= '' and (node ~= ARGV[3] or not KEYS[2]) then return {'node', node} end
if ARGV[5] == 'remove' then
  redis.call('DEL', KEYS[1])
  if node ~= '' then redis.call('ZREM', KEYS[2], claim) end
  return {'done'}
end
if ARGV[4] ~= '' then keep = ARGV[4] end
local left = ARGV[5] == 'keep' and node or ''
local head = 'lh1 ' .. claim .. ' ' .. string.format('%.0f', revision + 1) .. ' ' .. keep .. ' ' .. #left .. ' '
if ARGV[4] == '' then
  redis.call('SET', KEYS[1], head .. left .. ' ' .. ARGV[6], 'KEEPTTL')
else
  redis.call('SET', KEYS[1], head .. left .. ' ' .. ARGV[6], 'PX', keep)
end
if node ~= left then
  redis.call('ZREM', KEYS[2], claim)
elseif node ~= '' and ARGV[4] ~= '' then
  local time = redis.call('TIME')
  local ends = time[1] * 1000 + math.floor(time[2] / 1000) + keep
  redis.call('ZADD', KEYS[2], 'XX', string.format('%.0f', ends), claim)
  redis.call('PEXPIRE', KEYS[2], keep, 'GT')
end
return {'done'}
