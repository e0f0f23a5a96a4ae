-- Writes a step of work that is done once, or removes the record of a run without a result.
-- KEYS record   ARGV claim fence step [keep_ms payload]
--   step: "running" (it begins) | "over" (its result) | "remove"
-- A finished record is never changed. A running one is replaced by its own claim or a higher fence, and removed by its
-- claim.
-- A run with another payload than the record's does not begin.
-- replies {"done"} | {"gone"} | {"other", value} | {"too long"}: a value of another client, nothing was done
local value = redis.call('GETRANGE', KEYS[1], 0, STORED_MAX)
if #value > STORED_MAX then return {'too long'} end
local there = value ~= '' or redis.call('EXISTS', KEYS[1]) == 1
local revision = 0
if there then
  local claim, counted, at = value:match('^lh1 (%S+) (%d+) %d+ 0  ()')
  local stop = claim and value:find('\n', at, true)
  local read, head
  if stop then read, head = pcall(cjson.decode, value:sub(at, stop - 1)) end
  if not read or type(head) ~= 'table' then return {'other', value} end
  local ours = claim == ARGV[1]
  if head.state ~= 'running' then
    local over = head.state == 'done' or head.state == 'unstored'
    if over and ours and ARGV[3] == 'over' then return {'done'} end
    return {'other', value}
  end
  local fence = type(head.fence) == 'number' and head.fence or 0
  if not ours and (ARGV[3] == 'remove' or fence >= tonumber(ARGV[2])) then return {'other', value} end
  if ARGV[3] == 'running' and not ours and type(head.payload) == 'string' then
    local line = ARGV[5]:match('^[^\n]*')
    local known, asked = pcall(cjson.decode, line)
    asked = known and type(asked) == 'table' and asked.payload
    if type(asked) == 'string' and asked ~= head.payload then return {'other', value} end
  end
  if ours then revision = counted + 1 end
end
if ARGV[3] == 'remove' then
  if not there then return {'gone'} end
  redis.call('DEL', KEYS[1])
  return {'done'}
end
local head = 'lh1 ' .. ARGV[1] .. ' ' .. string.format('%.0f', revision) .. ' ' .. ARGV[4] .. ' 0  '
redis.call('SET', KEYS[1], head .. ARGV[5], 'PX', ARGV[4])
return {'done'}
