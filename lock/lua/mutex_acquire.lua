-- Takes the mutex if it is free and not reserved for another waiter.
--
-- KEYS  1 lock  2 fence  3 ended attempts  4 reservation  5 waiting  6 queue of a fair mutex
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms
--       4 life of a reservation, ms; 0: this attempt reserves nothing
--       5 server's time at which its process began to wait, µs, padded with zeros; '': now
--       6 life of a place among the waiting, ms; 0: this attempt is not to be woken
--       7 server's time after which the caller has left, µs: the error LATE, with the time
--
-- Returns the fence if this token holds the mutex, also when it asks again; or
--   {held, fence, 0, 0, 0, missed, expired}
--           missed  = 1 if it is to be woken, and is not among the waiting any more
--           expired = the token before, if its lease ended without a release
-- Otherwise it returns
--   {busy, number, ahead, last, age, added, holder}
--           number = what is left of the holder's lease, ms
--           ahead  = 0 if this attempt has the reservation, -1 if not
--           last   = the last fence; age = time since its grant, µs
--           added  = 1 if this attempt is among the waiting, and was not before; 2: too many wait to tell
--           holder = its token
--   {kept, number, ahead, last, age, added, waiter} the mutex is free, and reserved for another waiter
--           number = what is left of the reservation, ms
--   {refused, 0} this attempt was abandoned or released before the command arrived
--
-- The lock key holds the token of the holder. While there is a holder, the last fence is the
-- holder's. A fence is the server's clock in µs, or the last fence plus one if that is larger. So
-- it grows even after Redis has lost it, if the clock does.
--
-- The reservation has the waiting time and the token of the waiter that gets the mutex next. A
-- process that has waited for longer takes it over. It lasts for as long as the holder's lease, and
-- some time after it; a release leaves only that time.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ms = math.floor(now / 1000)
local ended = redis.call('ZSCORE', KEYS[3], ARGV[1])
if ended and tonumber(ended) > ms then return {'refused', 0} end
if now > tonumber(ARGV[7]) then return redis.error_reply('LATE ' .. string.format('%.0f', now)) end
local last, before = lastGrant(redis.call, KEYS[2])
if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end
local holder = redis.call('GET', KEYS[1])
local ours = holder == ARGV[1]
if ours and last > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return granted(last, leaves(KEYS[5], ARGV[1], ARGV[6] ~= '0'), {})
end
if not ours and redis.call('EXISTS', KEYS[6]) == 1 then
  return redis.error_reply('FOREIGN a fair mutex of this name has waiters')
end

local next = redis.call('GET', KEYS[4])
local me = ARGV[5] .. ARGV[1]
local insists = ARGV[4] ~= '0'
local reserved = next and next ~= me and not (insists and me < next)
if not ours and (holder or reserved) then
  local left = redis.call('PTTL', KEYS[holder and 1 or 4])
  if left == -1 then return redis.error_reply('FOREIGN the key has no expiry, so it is no lock of ours') end
  if insists and not reserved then
    redis.pcall('SET', KEYS[4], me, 'PX', math.max(left, 0) + ARGV[4])
    next = me
  end
  -- A write: a replica refuses it, since its data may be old.
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', ms))
  local added = 0
  if ARGV[6] ~= '0' then
    added = awaitWakeUp(KEYS[5], ARGV[1], ARGV[5] ~= '' and ARGV[5] or string.format('%.0f', now), ARGV[6])
  end
  return {holder and 'busy' or 'kept', math.max(left, 0), next == me and 0 or -1, last, math.max(now - last, 0), added,
    holder or string.sub(next, 21)}
end

local fence = math.max(last + 1, now)
redis.call('SET', KEYS[2], string.format('%.0f ', fence) .. ARGV[1], 'PX', ARGV[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if next == me then redis.call('DEL', KEYS[4]) end
if before == '' or before == ARGV[1] then before = nil end
return granted(fence, leaves(KEYS[5], ARGV[1], ARGV[6] ~= '0'), {before})
