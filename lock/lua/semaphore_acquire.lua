-- Takes one of size places if one is free and not reserved for another waiter.
--
-- KEYS  1 holders  2 fence  3 ended attempts  4 reservation  5 waiting  6 details
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms
--       4 life of a reservation, ms; 0: this attempt reserves nothing
--       5 server's time at which its process began to wait, µs, padded with zeros; '': now
--       6 life of a place among the waiting, ms; 0: this attempt is not to be woken
--       7 size
--       8 server's time after which the caller has left, µs: the error LATE, with the time
--
-- Returns the fence if this token holds a place, also when it asks again; or
--   {held, fence, 0, 0, 0, missed, expired…}
--           missed  = 1 if it is to be woken, and is not among the waiting any more
--           expired = tokens whose leases ended without a release, and were found now
-- Otherwise it returns
--   {busy, number, ahead, last, age, added, holder, expired…}
--           number = what is left of the lease that ends next, ms
--           ahead  = 0 if this attempt has the reservation, -1 if not
--           last   = the last fence; age = time since its grant, µs
--           added  = 1 if this attempt is among the waiting, and was not before; 2: too many wait to tell
--           holder = the token of that lease
--   {kept, number, ahead, last, age, added, waiter, expired…} the only free place is reserved for another waiter
--           number = what is left of the reservation, ms
--   {refused, 0} this attempt was abandoned or released before the command arrived
--
-- holders has the end of each lease, in ms of the server's clock; details has the fence of each lease,
-- the size, and until when that counts for processes with a smaller one: for the life of a lease after
-- the last grant or renewal to a process that has it, or until no lease is held. So the largest size counts
-- while processes disagree. The reservation works as for a mutex, and keeps one place.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ms = math.floor(now / 1000)
local ended = redis.call('ZSCORE', KEYS[3], ARGV[1])
if ended and tonumber(ended) > ms then return {'refused', 0} end
if now > tonumber(ARGV[8]) then return redis.error_reply('LATE ' .. string.format('%.0f', now)) end
local expired = {}
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', ms))) do
  redis.call('ZREM', KEYS[1], dead)
  redis.call('HDEL', KEYS[6], dead)
  if dead ~= ARGV[1] then expired[#expired + 1] = dead end
end

local taken = redis.call('ZCARD', KEYS[1])
-- HLEN refuses a foreign key.
if taken == 0 and redis.call('HLEN', KEYS[6]) > 0 then redis.call('DEL', KEYS[6]) end
local places = ARGV[7]
local size = tonumber(redis.call('HGET', KEYS[6], 'size') or places) or 0
local sizeUntil
if size > tonumber(places) then
  sizeUntil = tonumber(redis.call('HGET', KEYS[6], 'sizeUntil') or ms + ARGV[2])
  if sizeUntil > ms then places = size else sizeUntil = nil end
end
local last = lastGrant(redis.call, KEYS[2])
if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end
local next = redis.call('GET', KEYS[4])
local me = ARGV[5] .. ARGV[1]
local insists = ARGV[4] ~= '0'
local fence
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  fence = tonumber(redis.call('HGET', KEYS[6], ARGV[1]))
else
  local reserved = next and next ~= me and not (insists and me < next)
  local free = tonumber(places) - taken
  if free < 1 or reserved and free == 1 then
    local left, holder = redis.call('PTTL', KEYS[4]), string.sub(next or '', 21)
    if free < 1 then
      local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
      left, holder = tonumber(first[2]) - ms, first[1]
    end
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
    local reply = {free < 1 and 'busy' or 'kept', math.max(left, 0), next == me and 0 or -1, last, math.max(now - last, 0), added, holder}
    for _, token in ipairs(expired) do reply[#reply + 1] = token end
    return reply
  end
end
if not fence then
  fence = math.max(last + 1, now)
  redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', ARGV[3])
end

-- The keys outlive the leases by a minute, so that it is noticed if one ends without a release.
-- In this order a missing permission shows before a key could be left without a TTL.
local ends = tonumber(redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2] or 0)
ends = string.format('%.0f', math.max(ms + ARGV[2], ends) + 60000)
redis.call('PEXPIREAT', KEYS[6], ends)
sizeUntil = string.format('%.0f', sizeUntil or ms + ARGV[2])
redis.call('HSET', KEYS[6], ARGV[1], string.format('%.0f', fence), 'size', places, 'sizeUntil', sizeUntil)
redis.call('PEXPIREAT', KEYS[6], ends)
redis.call('ZADD', KEYS[1], string.format('%.0f', ms + ARGV[2]), ARGV[1])
redis.call('PEXPIREAT', KEYS[1], ends)
if next == me then redis.call('DEL', KEYS[4]) end
if size < tonumber(places) then -- a waiter with the smaller size can have a place, too
  local free = places - redis.call('ZCARD', KEYS[1])
  if free > 0 then wakeNext(KEYS[1], KEYS[4], KEYS[5], ARGV[2], free > 1) end
end
return granted(fence, leaves(KEYS[5], ARGV[1], ARGV[6] ~= '0'), expired)
