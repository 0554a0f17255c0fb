-- Return a value, or else try to take the fill lock: one step, one round trip.
--
-- KEYS  1 value  2 lock
-- ARGV  1 token of this attempt
--       2 TTL of the lock, ms
--       3 header of the entry that the caller knows, or ''
--       4 token of the holder that the caller has waited for, or ''
--       5 '1': take the lock if it is free; '0': only look
--       6 what entry 3 is good for:
--         ''         nothing
--         'fallback' it can be served: after a failed refresh the caller backs off
--         'served'   it has been served: the same, and once it is gone there is nothing to refresh
--       7 server's time after which the caller has left, µs: the error LATE, with the time, in place of
--         the lock
--
-- Returns {state, text, ms, known, age}
--   hit     text = an entry other than the known one, ms = the rest of its TTL, -1 without one
--   locked  this attempt holds the lock, text = the stamp of the grant; may be repeated
--   busy    text = the holder's token, ms = the rest of its TTL, age = µs since the grant, negative
--           if the server's clock was set back since
--   failed  text = the failure of the load that the caller waited for; or of a refresh, ms = how
--           long to back off; or one that is remembered for a caller without an entry, ms = for how long
--   free    the lock is free, and the caller only looked
--   gone    there is nothing to refresh
--   refused this attempt was abandoned before its command arrived
-- known is 1 if entry 3 is still there
--
-- The lock key holds a letter, a token and, perhaps, a failure:
--   H token stamp [failure]  held; the failure of the previous load is for its waiters
--   F token retry [failure]  free; the load of token failed; until retry, callers that have an entry
--                            to serve back off. T and 16 digits in front of the failure: until
--                            then it is remembered for callers without an entry to serve
--   X token                  free; token was abandoned and may not take the lock any more
-- stamp, retry and those behind T are 16 digits, µs of the server's clock. The stamp distinguishes grants to one
-- token: the command that takes the lock may arrive twice, the second time after a Delete. What was
-- loaded under the first grant must not be stored under the second.
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
  if header ~= ARGV[3] then return {'hit', redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), 0, 0} end
  known = 1
end

local lock = get('GET', KEYS[2])
if type(lock) == 'table' then return lock end
lock = lock or ''
local state, token, stamp, failure = string.sub(lock, 1, 1), string.sub(lock, 2, 27), string.sub(lock, 28, 43), string.sub(lock, 44)
if #lock < 27 or state ~= 'X' and #lock < 43 or not string.find('HFX', state, 1, true) then
  state, token = '', '' -- not a record
end
if state ~= 'H' and state ~= 'F' then failure = '' end
local remembered = string.match(failure, '^T(' .. string.rep('%d', 16) .. ')')
if remembered then failure = string.sub(failure, 18) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local late = now > tonumber(ARGV[7]) and redis.error_reply('LATE ' .. string.format('%.0f', now))

if token == ARGV[1] then
  if state ~= 'H' then return {'refused', '', 0, known, 0} end
  if late then return late end
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return {'locked', stamp, 0, known, 0}
end
if ARGV[6] == 'served' and known == 0 then return {'gone', '', 0, 0, 0} end
-- The token has changed since the caller began to wait: it has waited for the load of this failure.
if ARGV[4] ~= '' and failure ~= '' and (state == 'F' or token ~= ARGV[4]) then
  return {'failed', failure, 0, known, 0}
end
local left = -1
if state ~= '' then left = redis.call('PTTL', KEYS[2]) end
if left < 0 then state, failure = '', '' end -- every record has a TTL

local at = tonumber(string.match(stamp, '^%d+$') or 0)
if state == 'H' then return {'busy', token, left, known, now - at} end
if state == 'F' and ARGV[6] ~= '' and known == 1 then
  local rest = math.ceil((at - now) / 1000)
  if rest > 0 then return {'failed', failure, math.min(rest, left), 1, 0} end
end
if state == 'F' and ARGV[6] == '' and remembered then
  local ms = math.ceil((tonumber(remembered) - now) / 1000)
  if ms > 0 then return {'failed', failure, math.min(ms, left), known, 0} end
end
if ARGV[5] == '0' then return {'free', '', 0, known, 0} end
if late then return late end

stamp = string.format('%016.0f', now)
redis.call('SET', KEYS[2], 'H' .. ARGV[1] .. stamp .. failure, 'PX', ARGV[2])
return {'locked', stamp, 0, known, 0}
