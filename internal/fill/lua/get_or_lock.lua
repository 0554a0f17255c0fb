-- Look for a value, else compete for the fill lock: one step, one round trip.
--
-- KEYS  1 value  2 lock
-- ARGV  1 token of this attempt
--       2 life of the lock, ms
--       3 header of the entry the caller has read and refused, or ''
--       4 token of the holder the caller has been waiting for, or ''
--       5 '1': take the lock if it is free; '0': only look
--
-- Returns {state, text, ms}
--   hit     text = an entry other than the refused one
--   locked  the lock is ours, text = the stamp of the grant (asking again with the same token says so again)
--   busy    text = the holder's token, ms = what is left of its lock
--   failed  text = how the load that the caller waited for ended
--   free    nobody holds the lock, and the caller only looked
--   refused this attempt was abandoned before it arrived
--
-- The lock key holds one letter, a token and, perhaps, a failure:
--   H token stamp [failure]  held; the failure is that of the load before, kept for those who waited for it
--   F token failure          free; the load of token failed
--   X token                  free; token was abandoned and may not take the lock any more
-- The stamp tells grants to one token apart. The command that takes the lock may arrive twice, the second
-- time after a Delete: what was loaded under the first grant must not be stored under the second.

-- A key of a foreign type counts as absent: the next SET replaces it.
local function get(key)
  local v = redis.pcall('GET', key)
  if type(v) == 'table' and string.find(v.err, 'WRONGTYPE', 1, true) then return false end
  return v
end

local entry = get(KEYS[1])
if type(entry) == 'table' then return entry end
if entry and entry ~= '' and string.sub(entry, 1, 27) ~= ARGV[3] then return {'hit', entry, 0} end

local lock = get(KEYS[2])
if type(lock) == 'table' then return lock end
lock = lock or ''
local state, token, stamp, failure = string.sub(lock, 1, 1), string.sub(lock, 2, 27), '', string.sub(lock, 28)
if state == 'H' then stamp, failure = string.sub(lock, 28, 43), string.sub(lock, 44) end
if #lock < 27 or state == 'H' and #lock < 43 or not string.find('HFX', state, 1, true) then -- none of ours
  state, token, failure = '', '', ''
end

if token == ARGV[1] then
  if state ~= 'H' then return {'refused', '', 0} end
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return {'locked', stamp, 0}
end

-- Whoever has waited for another token than the one now holding has waited through this failure.
if ARGV[4] ~= '' and failure ~= '' and (state == 'F' or token ~= ARGV[4]) then
  return {'failed', failure, 0}
end

if state == 'H' then
  local left = redis.call('PTTL', KEYS[2])
  if left >= 0 then return {'busy', token, left} end -- no lock of ours is without an end
  failure = ''
end
if ARGV[5] == '0' then return {'free', '', 0} end
if state ~= 'F' then failure = '' end
local now = redis.call('TIME')
stamp = string.format('%010d%06d', tonumber(now[1]), tonumber(now[2]))
redis.call('SET', KEYS[2], 'H' .. ARGV[1] .. stamp .. failure, 'PX', ARGV[2])
return {'locked', stamp, 0}
