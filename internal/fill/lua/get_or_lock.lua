-- Look for a value, else compete for the fill lock: one step, one round trip.
--
-- KEYS  1 value  2 lock
-- ARGV  1 token of this attempt
--       2 life of the lock, ms
--       3 header of the entry the caller knows already, or ''
--       4 token of the holder the caller has been waiting for, or ''
--       5 '1': take the lock if it is free; '0': only look
--       6 what entry 3 is to the caller:
--         ''       nothing
--         'spare'  it can be served if need be: there is no load for a while after a failed refresh
--         'served' it is being served: the same, and once it is gone there is nothing to refresh
--
-- Returns {state, text, ms, known, age}
--   hit     text = an entry other than the known one
--   locked  the lock is ours, text = the stamp of the grant (asking again with the same token says so again)
--   busy    text = the holder's token, ms = what is left of its lock, age = µs since it was granted; less than 0
--           if the server's clock has been set back since
--   failed  text = how the load that the caller waited for ended, or one after which the source is to be left
--           alone for ms
--   free    nobody holds the lock, and the caller only looked
--   gone    there is nothing to refresh
--   refused this attempt was abandoned before it arrived
-- known is 1 if entry 3 is still there
--
-- The lock key holds one letter, a token and, perhaps, a failure:
--   H token stamp [failure]  held; the failure is that of the load before, kept for those who waited for it
--   F token retry [failure]  free; the load of token failed, and if it was a refresh there is none before retry
--   X token                  free; token was abandoned and may not take the lock any more
-- stamp and retry are 16 digits, µs of the server's clock. The stamp tells grants to one token apart. The command
-- that takes the lock may arrive twice, the second time after a Delete: what was loaded under the first grant
-- must not be stored under the second.
-- A key of a foreign type counts as absent: the next SET replaces it.

local function get(command, key, ...)
  local v = redis.pcall(command, key, ...)
  if type(v) == 'table' and string.find(v.err, 'WRONGTYPE', 1, true) then return false end
  return v
end

local header = get('GETRANGE', KEYS[1], 0, 34)
if type(header) == 'table' then return header end
local known = 0
if header and header ~= '' then
  if header ~= ARGV[3] then return {'hit', redis.call('GET', KEYS[1]), 0, 0, 0} end
  known = 1
end

local lock = get('GET', KEYS[2])
if type(lock) == 'table' then return lock end
lock = lock or ''
local state, token, stamp, failure = string.sub(lock, 1, 1), string.sub(lock, 2, 27), string.sub(lock, 28, 43), string.sub(lock, 44)
if #lock < 27 or state ~= 'X' and #lock < 43 or not string.find('HFX', state, 1, true) then -- none of ours
  state, token = '', ''
end
if state ~= 'H' and state ~= 'F' then failure = '' end

if token == ARGV[1] then
  if state ~= 'H' then return {'refused', '', 0, known, 0} end
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return {'locked', stamp, 0, known, 0}
end
if ARGV[6] == 'served' and known == 0 then return {'gone', '', 0, 0, 0} end
-- Whoever has waited for another token than the one now holding has waited through this failure.
if ARGV[4] ~= '' and failure ~= '' and (state == 'F' or token ~= ARGV[4]) then
  return {'failed', failure, 0, known, 0}
end
local left = -1
if state ~= '' then left = redis.call('PTTL', KEYS[2]) end
if left < 0 then state, failure = '', '' end -- no lock of ours is without an end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local at = tonumber(string.match(stamp, '^%d+$') or 0)
if state == 'H' then return {'busy', token, left, known, now - at} end
if state == 'F' and ARGV[6] ~= '' and known == 1 then
  local rest = math.ceil((at - now) / 1000)
  if rest > 0 then return {'failed', failure, math.min(rest, left), 1, 0} end
end
if ARGV[5] == '0' then return {'free', '', 0, known, 0} end

stamp = string.format('%016.0f', now)
redis.call('SET', KEYS[2], 'H' .. ARGV[1] .. stamp .. failure, 'PX', ARGV[2])
return {'locked', stamp, 0, known, 0}
